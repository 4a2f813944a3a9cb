"""A gRPC client on bare sockets that costs little and notes when each frame came: for latency and for many idle streams.

It speaks just enough HTTP/2 for a server that behaves: windows wide open, no HPACK decoding, one thread.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WIDE = 2**31 - 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """One header field, literal without indexing, no Huffman coding (RFC 7541 6.2.2); both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request_headers(path: str) -> bytes:
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"bench"))
    rest = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(literal(n, v) for n, v in fields + rest)


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def generate_request(max_new_tokens: int, prompt: bytes = b"import os\n") -> bytes:
    """A framed GenerateRequest: the prompt as text, max_new_tokens, output_token_ids."""
    body = field(3, prompt) + field(8, field(1, max_new_tokens)) + field(9, field(5, 1))
    return b"\0" + len(body).to_bytes(4, "big") + body


OnData = Callable[[int, bytes, float], None]
"""stream id, the frame's payload, time.monotonic() of the read that completed it"""


class Connection:
    """One connection; ``on_data`` is called for every DATA frame that is not empty, ``ended`` counts streams that ended."""

    def __init__(self, port: int, on_data: OnData | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HIHI", 2, 0, 4, WIDE)
        wide_open = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDE - 65535))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + wide_open)
        self.on_data = on_data
        self.ended = 0
        self.resets = 0
        self.next_stream = 1
        self.buffer = bytearray()

    def open(self, path: str, body: bytes) -> int:
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        data = frame(HEADERS, END_HEADERS, stream, request_headers(path))
        for start in range(0, len(body), 16384):
            chunk = body[start : start + 16384]
            data += frame(DATA, END_STREAM if start + 16384 >= len(body) else 0, stream, chunk)
        self.socket.sendall(data)
        return stream

    def readable(self) -> None:
        received = self.socket.recv(1 << 18)
        now = time.monotonic()
        if not received:
            raise SystemExit("the server closed a connection")
        buffer = self.buffer
        buffer += received
        at, end, consumed = 0, len(buffer), 0
        while end - at >= 9:
            high, low, kind, flags, stream = struct.unpack_from(">HBBBI", buffer, at)
            size = high << 8 | low
            if end - at - 9 < size:
                break
            payload = bytes(buffer[at + 9 : at + 9 + size])
            at += 9 + size
            if kind == DATA:
                consumed += size
                if size and self.on_data is not None:
                    self.on_data(stream, payload, now)
            elif kind == SETTINGS and not flags & ACK:
                self.socket.sendall(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.socket.sendall(frame(PING, ACK, 0, payload))
            elif kind == GOAWAY:
                raise SystemExit(f"the server sent GOAWAY: {payload!r}")
            elif kind == RST_STREAM:
                self.resets += 1
                self.ended += 1
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.ended += 1
        del buffer[:at]
        if consumed:
            self.socket.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", consumed)))

    def close(self) -> None:
        self.socket.close()


def pump(connections: list[Connection], until: Callable[[], bool], timeout: float) -> None:
    """Read on all connections until ``until()``; SystemExit after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for c in connections:
            selector.register(c.socket, selectors.EVENT_READ, c)
        while not until():
            left = end - time.monotonic()
            if left <= 0:
                raise SystemExit(f"not done after {timeout} s: {sum(c.ended for c in connections)} streams ended")
            for key, _ in selector.select(min(left, 0.05)):
                key.data.readable()


def tokens_in(payload: bytes) -> int:
    """num_tokens of the GenerateResponse in a DATA frame that holds whole messages; 0 for prompt_info."""
    total, at = 0, 0
    while at + 5 <= len(payload):
        size = int.from_bytes(payload[at + 1 : at + 5], "big")
        message = payload[at + 5 : at + 5 + size]
        at += 5 + size
        total += _num_tokens(message)
    return total


def _num_tokens(message: bytes) -> int:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 2:
            size, at = _varint(message, at)
            if key >> 3 == 2:
                return _num_tokens_of_outputs(message[at : at + size])
            at += size
        elif key & 7 == 0:
            _, at = _varint(message, at)
        else:
            at += 4
    return 0


def _num_tokens_of_outputs(outputs: bytes) -> int:
    at = 0
    while at < len(outputs):
        key, at = _varint(outputs, at)
        if key & 7 == 0:
            value, at = _varint(outputs, at)
            if key >> 3 == 3:
                return value
        elif key & 7 == 2:
            size, at = _varint(outputs, at)
            at += size
        else:
            at += 4
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
