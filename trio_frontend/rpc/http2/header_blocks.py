"""Header blocks: requests out of them, and response headers into them.

Rules:
- A block that does not change the table means the same until a block does: such requests are decoded and checked once.
- Encoding uses the static table only, so the peer's SETTINGS_HEADER_TABLE_SIZE costs nothing, and a constant block can be made once.
"""

from __future__ import annotations

from collections.abc import Iterable

from trio_frontend.rpc.http2.events import Headers
from trio_frontend.rpc.http2.header_rules import check_field, check_request
from trio_frontend.rpc.http2.hpack_decoder import HpackDecoder
from trio_frontend.rpc.http2.limits import Limits

NO_TABLE = b"\x20"  # a table size update to 0 (RFC 7541 6.3), due when the peer allows less than the default (RFC 7541 4.2)

_STATUS_200 = b"\x88"  # the static table's entry 8, indexed
_STATUS = b"\x08"  # a literal without indexing whose name is entry 8


class ListTooLong(Exception):
    """A header list over the limit, decoded to the end: the table is in step, the request is not served."""


class HeaderDecoder:
    """The peer's header blocks, decoded in the order in which they came."""

    __slots__ = ("_cache", "_cache_generation", "_cache_left", "_cache_size", "_hpack", "_max_list_size")

    def __init__(self, limits: Limits) -> None:
        self._max_list_size = limits.max_header_list_size
        self._hpack = HpackDecoder(4 * limits.max_header_list_size)
        self._cache: dict[bytes, tuple[Headers, int]] = {}
        self._cache_generation = 0
        self._cache_size = limits.header_cache_size
        self._cache_left = limits.header_cache_size

    def decode_request(self, block: bytes) -> tuple[Headers, int]:
        """A request's header list, which is shared and must not be changed, and its content-length (-1: none).

        Raises ProtocolError, ListTooLong, or Malformed.
        """
        generation = self._hpack.generation
        if generation != self._cache_generation:
            self._forget()
            self._cache_generation = generation
        known = self._cache.get(block)
        if known is not None:
            return known
        headers, size = self._decode(block)
        request = headers, check_request(headers)
        if generation == self._hpack.generation:
            self._remember(block, request, len(block) + size)
        return request

    def decode(self, block: bytes) -> Headers:
        """Any other header list; raises ProtocolError or ListTooLong."""
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, int]:
        headers, size = self._hpack.decode(block)
        if size > self._max_list_size:
            raise ListTooLong
        return headers, size

    def _remember(self, block: bytes, request: tuple[Headers, int], cost: int) -> None:
        if cost > self._cache_left:
            self._forget()
            if cost > self._cache_size:
                return
        self._cache[block] = request
        self._cache_left -= cost

    def _forget(self) -> None:
        self._cache.clear()
        self._cache_left = self._cache_size


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block of literals without indexing, good on any connection at any time, so constant headers can be encoded once.

    Raises ValueError for a name or value that HTTP/2 does not allow.
    """
    out = bytearray()
    for name, value in headers:
        check_field(name, value)
        if name == b":status":
            if value == b"200":
                out += _STATUS_200
                continue
            out += _STATUS
        else:
            out += b"\0"
            _append_string(out, name)
        _append_string(out, value)
    return bytes(out)


def _append_string(out: bytearray, text: bytes) -> None:
    """A string without Huffman code (RFC 7541 5.2)."""
    length = len(text)
    if length < 0x7F:
        out.append(length)
    else:
        out.append(0x7F)
        length -= 0x7F
        while length > 0x7F:
            out.append(length & 0x7F | 0x80)
            length >>= 7
        out.append(length)
    out += text
