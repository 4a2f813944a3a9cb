"""Header blocks: HPACK (RFC 7541) in and out.

Rules:
- Decoding is the hpack library's, and nothing reaches it that could cost more than its length: every block is walked first, so that
  integers, string lengths and table size updates are known to be in bounds. The list limit is set on the decoder itself.
- A block that the decoder cannot read leaves the table unknown, which is the connection's end (RFC 9113 4.3).
- A block that does not change the table means the same until a block does: such requests are decoded and checked once.
- Encoding uses the static table only, so the peer's SETTINGS_HEADER_TABLE_SIZE costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import hpack
from hpack.table import HeaderTable

from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError
from trio_frontend.rpc.http2.events import Headers
from trio_frontend.rpc.http2.header_rules import check_field, check_request
from trio_frontend.rpc.http2.limits import Limits

DEFAULT_TABLE_SIZE = 4_096  # RFC 9113 6.5.2
NO_TABLE = b"\x20"  # a table size update to 0 (RFC 7541 6.3), due when the peer allows less than the default (RFC 7541 4.2)

_ENTRY_OVERHEAD = 32  # RFC 7541 4.1
_STATUS_200 = b"\x88"  # the static table's entry 8, indexed
_STATUS = b"\x08"  # a literal without indexing whose name is entry 8
_MAX_TABLE_UPDATES = 2  # RFC 7541 4.2: at most the smallest size and the final one


class _Table(HeaderTable):  # type: ignore[misc]  # hpack 3 has no types
    """hpack 3 would keep the whole block that a field came in, by a view of it."""

    def add(self, name: bytes, value: bytes) -> None:
        super().add(bytes(name), bytes(value))


class ListTooLong(Exception):
    """A header list over the limit, decoded to the end: the table is in step, the request is not served."""


class HeaderDecoder:
    """The peer's header blocks, decoded in the order in which they came."""

    __slots__ = ("_cache", "_cache_left", "_cache_size", "_decoder", "_max_list_size")

    def __init__(self, limits: Limits) -> None:
        self._max_list_size = limits.max_header_list_size
        self._decoder = hpack.Decoder(max_header_list_size=4 * limits.max_header_list_size)
        self._decoder.header_table = _Table()
        self._cache: dict[bytes, tuple[Headers, int]] = {}
        self._cache_size = limits.header_cache_size
        self._cache_left = limits.header_cache_size

    def decode_request(self, block: bytes) -> tuple[Headers, int]:
        """A request's header list, which is shared and must not be changed, and its content-length (-1: none).

        Raises ProtocolError, ListTooLong, or Malformed.
        """
        known = self._cache.get(block)
        if known is not None:
            return known
        changes_table = walk(block)
        if changes_table:
            self._cache.clear()
            self._cache_left = self._cache_size
        headers, size = self._decode(block)
        request = headers, check_request(headers)
        if not changes_table:
            self._remember(block, request, size)
        return request

    def decode(self, block: bytes) -> Headers:
        """Any other header list; raises ProtocolError or ListTooLong."""
        if walk(block):
            self._cache.clear()
            self._cache_left = self._cache_size
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, int]:
        try:
            headers: Headers = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.OversizedHeaderListError:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header list too long") from None
        except hpack.HPACKError:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "header block that cannot be decoded") from None
        size = sum(len(name) + len(value) + _ENTRY_OVERHEAD for name, value in headers)
        if size > self._max_list_size:
            raise ListTooLong
        return headers, size

    def _remember(self, block: bytes, request: tuple[Headers, int], size: int) -> None:
        cost = len(block) + size
        if cost > self._cache_left:
            self._cache.clear()
            self._cache_left = self._cache_size
            if cost > self._cache_size:
                return
        self._cache[block] = request
        self._cache_left -= cost


def walk(block: bytes) -> bool:
    """Whether a block changes the dynamic table. Raises ProtocolError if its structure is broken (RFC 7541 5 and 6)."""
    changes = False
    updates = 0
    position = 0
    end = len(block)
    try:
        while position < end:
            first = block[position]
            if first & 0x80:  # indexed
                position = _skip_integer(block, position, 0x7F)[1]
                continue
            if first & 0x40:  # literal with incremental indexing
                changes = True
                name_index, position = _skip_integer(block, position, 0x3F)
            elif first & 0x20:  # table size update
                changes = True
                updates += 1
                if updates > _MAX_TABLE_UPDATES:
                    raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "too many table size updates")
                position = _skip_integer(block, position, 0x1F)[1]
                continue
            else:  # literal without indexing, or never indexed
                name_index, position = _skip_integer(block, position, 0x0F)
            if not name_index:
                length, position = _skip_integer(block, position, 0x7F)
                position += length
            length, position = _skip_integer(block, position, 0x7F)
            position += length
    except IndexError:
        position = end + 1
    if position > end:
        raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "truncated header block")
    return changes


def _skip_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """An integer (RFC 7541 5.1) and the position after it. More than 28 bits are refused: nothing here is that large."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for shift in (0, 7, 14, 21):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "integer too long")


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
