"""Frames as bytes (RFC 9113 4 and 6).

Rules:
- A frame is 9 bytes of header (length 24 bits, type 8, flags 8, a reserved bit, stream id 31), then its payload.
- Here is layout only: what a frame may follow, and what it does, is decided in connection.py.
"""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_LENGTH = 9
STREAM_ID_MASK = 0x7FFF_FFFF

DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

SETTINGS_HEADER_TABLE_SIZE = 0x1
SETTINGS_ENABLE_PUSH = 0x2
SETTINGS_MAX_CONCURRENT_STREAMS = 0x3
SETTINGS_INITIAL_WINDOW_SIZE = 0x4
SETTINGS_MAX_FRAME_SIZE = 0x5
SETTINGS_MAX_HEADER_LIST_SIZE = 0x6

_HEADER = struct.Struct(">LBL")
_HEADER_AND_WORD = struct.Struct(">LBLL")
_SETTING = struct.Struct(">HL")
_TWO_WORDS = struct.Struct(">LL")
_WORD = struct.Struct(">L")

unpack_header = _HEADER.unpack_from  # (length << 8 | type, flags, stream id with its reserved bit)
pack_header = _HEADER.pack
unpack_word = _WORD.unpack_from
unpack_two_words = _TWO_WORDS.unpack_from
unpack_settings = _SETTING.iter_unpack

SETTINGS_ACK = pack_header(SETTINGS, ACK, 0)


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return pack_header(len(payload) << 8 | kind, flags, stream_id) + payload


def rst_stream(stream_id: int, error_code: int) -> bytes:
    return _HEADER_AND_WORD.pack(4 << 8 | RST_STREAM, 0, stream_id, error_code)


def window_update(stream_id: int, increment: int) -> bytes:
    return _HEADER_AND_WORD.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def ping(payload: bytes, flags: int) -> bytes:
    return frame(PING, flags, 0, payload)


def goaway(last_stream_id: int, error_code: int, debug: bytes) -> bytes:
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, error_code) + debug)


def header_block(stream_id: int, block: bytes, end_stream: bool, max_frame_size: int) -> bytes:
    """HEADERS, and as many CONTINUATIONs as the frame size makes necessary."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame_size:
        return pack_header(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    parts = [frame(HEADERS, flags, stream_id, block[:max_frame_size])]
    for start in range(max_frame_size, len(block), max_frame_size):
        last = END_HEADERS if start + max_frame_size >= len(block) else 0
        parts.append(frame(CONTINUATION, last, stream_id, block[start : start + max_frame_size]))
    return b"".join(parts)
