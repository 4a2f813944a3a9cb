"""HPACK decoding (RFC 7541), with bounds.

Rules:
- The dynamic table and the Huffman code are the hpack library's. The walk over a block is ours, since it carries the bounds: the
  library's own has none for integers (a block of 0xff is quadratic), and copies what is left of the block for every field.
- Integers have at most 28 bits, a block has at most two table size updates, at its start, and a list is not decoded beyond its limit.
- A block that cannot be decoded leaves the table unknown, which is the connection's end (RFC 9113 4.3).
"""

from __future__ import annotations

import logging

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError
from trio_frontend.rpc.http2.events import Headers
from trio_frontend.rpc.http2.limits import DEFAULT_TABLE_SIZE

# The library's table writes every field that it evicts into the log at DEBUG, credentials among them.
logging.getLogger("hpack").setLevel(logging.INFO)

_ENTRY_OVERHEAD = 32  # RFC 7541 4.1

_MAX_TABLE_UPDATES = 2  # RFC 7541 4.2: at most the smallest size and the final one

_INDEXED = 0x80
_INCREMENTAL = 0x40
_TABLE_UPDATE = 0x20
_HUFFMAN = 0x80


class HpackDecoder:
    """The decoder of one connection: its table follows every block, in the order in which they came."""

    __slots__ = ("_max_list_size", "_table", "generation")

    def __init__(self, max_list_size: int) -> None:
        self._max_list_size = max_list_size
        self._table = HeaderTable()
        self.generation = 0  # changes whenever the table does

    def decode(self, block: bytes) -> tuple[Headers, int]:
        """A header list, and its size as RFC 9113 6.5.2 counts it.

        Raises ProtocolError: COMPRESSION_ERROR, or ENHANCE_YOUR_CALM if the list is longer than the limit.
        """
        try:
            return self._decode(block)
        except (HPACKError, IndexError):
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, "header block that cannot be decoded") from None

    def _decode(self, block: bytes) -> tuple[Headers, int]:
        table = self._table
        entry = table.get_by_index
        headers: Headers = []
        size = updates = position = 0
        end = len(block)
        while position < end:
            first = block[position]
            if first & _INDEXED:
                index, position = _integer(block, position, 0x7F)
                field: tuple[bytes, bytes] = entry(index)
            elif first & _INCREMENTAL:
                field, position = self._literal(block, position, 0x3F)
                table.add(*field)
                self.generation += 1
            elif first & _TABLE_UPDATE:
                updates += 1
                table_size, position = _integer(block, position, 0x1F)
                if headers or updates > _MAX_TABLE_UPDATES or table_size > DEFAULT_TABLE_SIZE:
                    raise HPACKError
                table.maxsize = table_size
                self.generation += 1
                continue
            else:  # without indexing, or never indexed
                field, position = self._literal(block, position, 0x0F)
            size += len(field[0]) + len(field[1]) + _ENTRY_OVERHEAD
            if size > self._max_list_size:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header list too long")
            headers.append(field)
        return headers, size

    def _literal(self, block: bytes, position: int, mask: int) -> tuple[tuple[bytes, bytes], int]:
        """A literal field (RFC 7541 6.2), whose name may be that of an entry."""
        index, position = _integer(block, position, mask)
        if index:
            name: bytes = self._table.get_by_index(index)[0]
        else:
            name, position = _string(block, position)
        value, position = _string(block, position)
        return (name, value), position


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """An integer (RFC 7541 5.1), and the position after it. No index, length or size here needs more than 28 bits."""
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
    raise HPACKError


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """A string (RFC 7541 5.2), and the position after it."""
    huffman = block[position] & _HUFFMAN
    length, position = _integer(block, position, 0x7F)
    stop = position + length
    if stop > len(block):
        raise HPACKError
    text = block[position:stop]
    return (decode_huffman(text) if huffman else text), stop
