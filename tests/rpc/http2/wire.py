"""A client's frames, built and read by hand: nothing here is shared with the code under test.

`Client` plays the client of one Connection: it gives it frames, and reads what the connection sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

from trio_frontend.rpc import http2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR = range(7)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM = range(7, 12)

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(
    1, 7
)

Fields = list[tuple[bytes, bytes]]

REQUEST: Fields = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/pkg.Service/Method"),
    (b":authority", b"localhost:50051"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]
RESPONSE = http2.encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
TRAILERS = http2.encode_headers([(b"grpc-status", b"0")])


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """An HPACK integer (RFC 7541 5.1) whose first byte has `first` in its other bits."""
    top = (1 << bits) - 1
    if value < top:
        return bytes((first | value,))
    out = bytearray((first | top,))
    value -= top
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """A literal field with a literal name: without indexing, or, with `first` 0x40, with incremental indexing."""
    return bytes((first,)) + integer(len(name), 7) + name + integer(len(value), 7) + value


def block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(literal(name, value) for name, value in fields)


def headers(stream_id: int, fields: Iterable[tuple[bytes, bytes]] = REQUEST, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream_id, block(fields))


def data(stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return frame(DATA, flags, stream_id, payload)


def padded(payload: bytes, padding: int) -> bytes:
    return bytes((padding,)) + payload + bytes(padding)


def word(value: int) -> bytes:
    return value.to_bytes(4, "big")


def rst_stream(stream_id: int, error_code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream_id, word(error_code))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, word(increment))


def settings(values: Iterable[tuple[int, int]] = ()) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + word(value) for key, value in values))


def ping(payload: bytes = b"12345678", flags: int = 0) -> bytes:
    return frame(PING, flags, 0, payload)


def goaway(last_stream_id: int = 0, error_code: int = NO_ERROR, debug: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, word(last_stream_id) + word(error_code) + debug)


def read_frames(output: bytes) -> list[Frame]:
    """The frames of an output; it must end with a whole one."""
    out = []
    position = 0
    while position < len(output):
        stop = position + 9 + int.from_bytes(output[position : position + 3], "big")
        assert stop <= len(output), "an unfinished frame was sent"
        stream_id = int.from_bytes(output[position + 5 : position + 9], "big")
        out.append(Frame(output[position + 3], output[position + 4], stream_id, output[position + 9 : stop]))
        position = stop
    return out


def ends_request(event: http2.Event) -> TypeGuard[http2.RequestReceived | http2.DataReceived | http2.TrailersReceived]:
    """Whether a request is whole with this event."""
    if isinstance(event, (http2.RequestReceived, http2.DataReceived)):
        return event.end_stream
    return isinstance(event, http2.TrailersReceived)


class Client:
    """The client's end of a Connection that has had preface and SETTINGS."""

    def __init__(self, **limits: object) -> None:
        self.limits = http2.Limits(**limits)  # type: ignore[arg-type]
        self.connection = http2.Connection(self.limits)
        self.now = 0.0
        self.events: list[http2.Event] = []
        assert self.send(PREFACE, settings()) == []
        self.sent()

    def send(self, *frames: bytes) -> list[http2.Event]:
        events = self.connection.receive_data(b"".join(frames), self.now)
        self.events += events
        return events

    def sent(self) -> list[Frame]:
        """What the connection has sent since the last call."""
        return read_frames(self.connection.take_output())

    def open(self, *stream_ids: int) -> None:
        """Requests whose body is still to come, answered with response headers."""
        for stream_id in stream_ids:
            self.send(headers(stream_id))
            self.connection.send_headers(stream_id, RESPONSE)
        self.sent()

    def failure(self) -> int:
        """The error code with which the connection failed; it must have said so, once, at the end."""
        failed = [event for event in self.events if isinstance(event, http2.ConnectionFailed)]
        assert len(failed) == 1, f"the connection did not fail: {self.events[-5:]}"
        assert self.events[-1] is failed[0]
        last = self.sent()[-1]
        assert last.kind == GOAWAY
        assert int.from_bytes(last.payload[4:8], "big") == failed[0].error.code
        return int(failed[0].error.code)

    def still_serves(self, stream_id: int) -> bool:
        """Whether a new request goes through and is answered."""
        events = self.send(headers(stream_id, flags=END_HEADERS | END_STREAM))
        if [type(event) for event in events] != [http2.RequestReceived]:
            return False
        self.connection.send_headers(stream_id, TRAILERS, end_stream=True)
        return self.sent()[-1] == Frame(HEADERS, END_HEADERS | END_STREAM, stream_id, TRAILERS)


def reset_code(frames: list[Frame], stream_id: int) -> int:
    """The error code of the one RST_STREAM of a stream."""
    [reset] = [frame for frame in frames if frame.kind == RST_STREAM and frame.stream_id == stream_id]
    return int.from_bytes(reset.payload, "big")
