"""The cases of the second opinion, and why h2 answers some of them otherwise.

Most are built from the tables of the tests beside this file, so that what is added there is asked about here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from tests.rpc.http2.fuzz import RECORDED
from tests.rpc.http2.test_header_blocks import BROKEN
from tests.rpc.http2.test_header_rules import MALFORMED, WELL_FORMED
from tests.rpc.http2.wire import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    block,
    data,
    frame,
    goaway,
    headers,
    literal,
    padded,
    ping,
    rst_stream,
    settings,
    window_update,
)

Steps: TypeAlias = list[list[Any]]

START = PREFACE + settings() + frame(SETTINGS, ACK)
WHOLE = END_HEADERS | END_STREAM
LATER = headers(99, flags=WHOLE)  # whether the connection goes on
TRAILER = headers(1, [(b"a", b"b")], WHOLE)


class Difference(NamedTuple):
    """What the two say to the cases that match a pattern, and the section of RFC 9113 that decides between them."""

    cases: str
    ours: str
    h2: str
    section: str


def receive(*frames: bytes) -> list[Any]:
    return ["receive", b"".join(frames).hex()]


def one_by_one(frames: bytes) -> Steps:
    """A read for each frame: h2 drops the good events of a read with an error in it, which is asked about once and not everywhere."""
    steps = []
    while frames:
        length = 9 + int.from_bytes(frames[:3], "big")
        steps.append(receive(frames[:length]))
        frames = frames[length:]
    return steps


def _single() -> Iterator[tuple[str, bytes]]:
    """Cases of one read after the start: each is followed by a later request."""
    for name, fields in MALFORMED.items():
        yield f"request: {name}", headers(1, fields)
    for name, fields in WELL_FORMED.items():
        yield f"request: {name}", headers(1, fields, WHOLE)
    for name, encoded in BROKEN.items():
        yield f"block: {name}", frame(HEADERS, WHOLE, 1, encoded)
    yield "trailers", headers(1) + data(1, b"x") + TRAILER
    yield "trailers without END_STREAM", headers(1) + headers(1, [(b"a", b"b")])
    yield "trailers with a pseudo-header field", headers(1) + headers(1, [(b":path", b"/")], WHOLE)
    yield "trailers with an upper-case name", headers(1) + headers(1, [(b"A", b"b")], WHOLE)
    yield (
        "a body that fits its content-length",
        headers(1, [*REQUEST, (b"content-length", b"1")]) + data(1, b"x", END_STREAM),
    )
    yield "a body longer than its content-length", headers(1, [*REQUEST, (b"content-length", b"1")]) + data(1, b"xy")
    yield (
        "a body shorter than its content-length",
        headers(1, [*REQUEST, (b"content-length", b"2")]) + data(1, b"x", END_STREAM),
    )
    yield "no body, but a content-length", headers(1, [*REQUEST, (b"content-length", b"2")], WHOLE)
    yield "a content-length and trailers too early", headers(1, [*REQUEST, (b"content-length", b"2")]) + TRAILER
    for name, make in {
        "DATA": lambda stream_id: data(stream_id, b"x"),
        "HEADERS": lambda stream_id: headers(stream_id, flags=WHOLE),
        "RST_STREAM": rst_stream,
        "WINDOW_UPDATE": lambda stream_id: window_update(stream_id, 1),
        "PRIORITY": lambda stream_id: frame(PRIORITY, 0, stream_id, b"\0\0\0\0\1"),
        "CONTINUATION": lambda stream_id: frame(CONTINUATION, END_HEADERS, stream_id, block(REQUEST)),
        "PUSH_PROMISE": lambda stream_id: frame(PUSH_PROMISE, END_HEADERS, stream_id, b"\0\0\0\2" + block(REQUEST)),
        "an unknown type": lambda stream_id: frame(0x99, 0xFF, stream_id, b"x"),
    }.items():
        yield f"{name} on stream 0", make(0)
        yield f"{name} on an idle stream", headers(1) + make(3)
        yield f"{name} on an even stream", headers(5) + make(2)
        yield f"{name} on a stream that was skipped", headers(5) + make(1)
        yield f"{name} on an open stream", headers(1) + make(1)
        yield f"{name} after END_STREAM", headers(1, flags=WHOLE) + make(1)
        yield f"{name} after the peer's RST_STREAM", headers(1) + rst_stream(1) + make(1)
        yield f"{name} inside a header block", headers(1, flags=0) + make(1)
    for name, kind, stream_id, lengths in (
        ("PRIORITY", PRIORITY, 1, (4, 6)),
        ("RST_STREAM", RST_STREAM, 1, (3, 5)),
        ("SETTINGS", SETTINGS, 0, (5, 7)),
        ("PING", PING, 0, (7, 9)),
        ("GOAWAY", GOAWAY, 0, (7,)),
        ("WINDOW_UPDATE", WINDOW_UPDATE, 1, (3, 5)),
        ("WINDOW_UPDATE of the connection", WINDOW_UPDATE, 0, (3, 5)),
    ):
        for length in lengths:
            yield f"{name} of {length} bytes", headers(1) + frame(kind, 0, stream_id, bytes(length))
    yield "a short PRIORITY on an idle stream", headers(1) + frame(PRIORITY, 0, 9, bytes(4))
    yield "SETTINGS on a stream", frame(SETTINGS, 0, 1)
    yield "PING on a stream", frame(PING, 0, 1, bytes(8))
    yield "GOAWAY on a stream", frame(GOAWAY, 0, 1, bytes(8))
    yield "a SETTINGS ack with a payload", frame(SETTINGS, ACK, 0, bytes(6))
    yield "a SETTINGS ack too many", frame(SETTINGS, ACK)
    yield "unknown settings", settings([(0, 1), (0xFFFF, 2**32 - 1)])
    yield "ENABLE_PUSH of 2", settings([(ENABLE_PUSH, 2)])
    yield "MAX_FRAME_SIZE too small", settings([(MAX_FRAME_SIZE, 16_383)])
    yield "MAX_FRAME_SIZE too large", settings([(MAX_FRAME_SIZE, 2**24)])
    yield "INITIAL_WINDOW_SIZE too large", settings([(INITIAL_WINDOW_SIZE, 2**31)])
    yield (
        "INITIAL_WINDOW_SIZE that overflows a stream",
        headers(1) + window_update(1, 1) + settings([(INITIAL_WINDOW_SIZE, 2**31 - 1)]),
    )
    yield "INITIAL_WINDOW_SIZE of 0", headers(1) + settings([(INITIAL_WINDOW_SIZE, 0)])
    yield "PING", ping()
    yield "a PING ack that answers nothing", ping(flags=ACK)
    yield "GOAWAY", headers(1) + goaway(0, 2, b"debug") + data(1, b"x", END_STREAM)
    yield "WINDOW_UPDATE of 0 on the connection", window_update(0, 0)
    yield "WINDOW_UPDATE of 0 on a stream", headers(1) + window_update(1, 0)
    yield "WINDOW_UPDATE that overflows the connection", window_update(0, 2**31 - 1)
    yield "WINDOW_UPDATE that overflows a stream", headers(1) + window_update(1, 2**31 - 1)
    yield "a stream id with its reserved bit", headers(1 | 1 << 31, flags=WHOLE)
    yield "unknown flags", headers(1, flags=END_HEADERS | 0xC2) + data(1, b"x", END_STREAM | 0xF6)
    yield (
        "a stream that depends on itself, in HEADERS",
        frame(HEADERS, WHOLE | PRIORITIZED, 1, b"\0\0\0\1\xff" + block(REQUEST)),
    )
    yield "a stream that depends on itself, in PRIORITY", frame(PRIORITY, 0, 1, b"\0\0\0\1\xff")
    yield "HEADERS too short for their priority", frame(HEADERS, WHOLE | PRIORITIZED, 1, bytes(4))
    yield "padded DATA", headers(1) + data(1, padded(b"abc", 200), PADDED | END_STREAM)
    yield "padded HEADERS", frame(HEADERS, WHOLE | PADDED, 1, padded(block(REQUEST), 9))
    yield (
        "padded HEADERS with priority",
        frame(HEADERS, WHOLE | PADDED | PRIORITIZED, 1, padded(bytes(5) + block(REQUEST), 9)),
    )
    yield "DATA of padding only", headers(1) + data(1, padded(b"", 9), PADDED) + data(1, b"", END_STREAM)
    yield "padding as long as its DATA frame", headers(1) + data(1, b"\x04abc", PADDED)
    yield "padding as long as its HEADERS frame", frame(HEADERS, WHOLE | PADDED, 1, b"\x04abc")
    yield "a padded DATA frame without a pad length", headers(1) + data(1, b"", PADDED)
    yield "a padded HEADERS frame without a pad length", frame(HEADERS, WHOLE | PADDED, 1)
    yield (
        "a header block in three pieces",
        (
            frame(HEADERS, END_STREAM, 1, block(REQUEST)[:5])
            + frame(CONTINUATION, 0, 1)
            + frame(CONTINUATION, END_HEADERS, 1, block(REQUEST)[5:])
        ),
    )
    yield "CONTINUATION of another stream", headers(1, flags=0) + frame(CONTINUATION, END_HEADERS, 3)
    yield "a frame that is too long", headers(1) + data(1, bytes(16_385))
    yield "a stream's window used up", headers(1) + data(1, bytes(16_384)) * 3 + data(1, bytes(16_383), END_STREAM)
    yield "a window overrun", headers(1) + data(1, bytes(16_384)) * 4
    yield (
        "entries inserted and used",
        (
            frame(HEADERS, WHOLE, 1, block(REQUEST) + literal(b"x", b"y", 0x40))
            + frame(HEADERS, WHOLE, 3, block(REQUEST) + b"\xbe")
        ),
    )


def cases() -> Iterator[tuple[str, Steps]]:
    for name, frames in _single():
        yield name, [receive(START), *one_by_one(frames), receive(LATER)]
    answered: Steps = [receive(START, headers(1, flags=WHOLE)), ["respond", 1]]
    reset: Steps = [receive(START, headers(1)), ["reset", 1]]
    leaving: Steps = [receive(START, headers(1)), ["go away"]]
    for name, frames in {
        "DATA": data(1, b"x"),
        "HEADERS": TRAILER,
        "RST_STREAM": rst_stream(1),
        "WINDOW_UPDATE": window_update(1, 1),
        "PRIORITY": frame(PRIORITY, 0, 1, b"\0\0\0\0\1"),
    }.items():
        yield f"{name} after our answer", [*answered, receive(frames), receive(LATER)]
        yield f"{name} after our RST_STREAM", [*reset, receive(frames), receive(LATER)]
    streams = b"".join(headers(2 * i + 1, flags=WHOLE) for i in range(5))
    yield "more streams than allowed", [receive(START), *one_by_one(streams)]
    yield (
        "good frames before a bad one in one read",
        [receive(START, headers(1), data(1, b"x"), frame(PING, 0, 1, bytes(8)))],
    )
    yield "a body that ends after our GOAWAY", [*leaving, receive(data(1, b"x", END_STREAM)), ["respond", 1]]
    yield "a stream opened after our GOAWAY", [*leaving, receive(headers(3, flags=WHOLE))]
    yield "no preface", [["receive", b"GET / HTTP/1.1\r\n\r\n".hex()]]
    yield "no SETTINGS after the preface", [receive(PREFACE, ping())]
    yield "a SETTINGS ack after the preface", [receive(PREFACE, frame(SETTINGS, ACK))]
    for path in sorted(RECORDED.glob("*.bin")):
        yield f"recorded: {path.stem}", list(_answered(path.read_bytes()))


def _answered(record: bytes) -> Iterator[list[Any]]:
    """A recording, with an answer where a request ends."""
    yield receive(record[: len(PREFACE)])
    for step in one_by_one(record[len(PREFACE) :]):
        yield step
        kind, flags, stream_id = bytes.fromhex(step[1][6:8])[0], bytes.fromhex(step[1][8:10])[0], int(step[1][10:18], 16)
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            yield ["respond", stream_id]


CASES: dict[str, Steps] = dict(cases())

_MALFORMED = "RST_STREAM 1 PROTOCOL_ERROR, acks 0/1; request 99, end 99"
_MALFORMED_LATER = "RST_STREAM 1 PROTOCOL_ERROR, acks 0/1; request 1, request 99, end 99"
_ENDED = "GOAWAY PROTOCOL_ERROR, acks 0/1; nothing seen"
_ENDED_LATER = "GOAWAY PROTOCOL_ERROR, acks 0/1; request 1"
_TAKEN = "acks 0/1; request 1, end 1, request 99, end 99"
_TAKEN_UNFINISHED = "acks 0/1; request 1, request 99, end 99"

DIFFERENCES: list[Difference] = [
    # A malformed request ends its stream.
    Difference(
        "request: *",
        _MALFORMED,
        _ENDED,
        "8.1.1: malformed requests MUST be treated as a stream error of type PROTOCOL_ERROR",
    ),
    Difference("CONTINUATION inside a header block", _MALFORMED, _ENDED, "8.1.1, as above: pseudo-header fields twice"),
    Difference("trailers with*", _MALFORMED_LATER, _ENDED_LATER, "8.1 and 8.1.1: malformed, a stream error"),
    Difference(
        "HEADERS on an open stream", _MALFORMED_LATER, _ENDED_LATER, "8.1: a request with a section too many is malformed"
    ),
    Difference("a body * than its content-length", _MALFORMED_LATER, _ENDED_LATER, "8.1.1: malformed, a stream error"),
    Difference(
        "no body, but a content-length",
        _MALFORMED,
        _TAKEN,
        "8.1.1: a content-length that does not equal the DATA is malformed",
    ),
    Difference(
        "a content-length and trailers too early",
        _MALFORMED_LATER,
        "acks 0/1; request 1, trailers 1, end 1, request 99, end 99",
        "8.1.1: a content-length that does not equal the DATA is malformed",
    ),
    # What is well-formed.
    Difference(
        "request: an empty method", _MALFORMED, _TAKEN_UNFINISHED, "8.3.1: exactly one valid value; RFC 9110 9.1: a token"
    ),
    Difference(
        "request: an empty scheme", _MALFORMED, _TAKEN_UNFINISHED, "8.3.1: exactly one valid value; RFC 3986 3.1: not empty"
    ),
    Difference(
        "request: a protocol, which we have not allowed",
        _MALFORMED,
        _TAKEN_UNFINISHED,
        "8.3: an undefined pseudo-header field is malformed, and RFC 8441 3 defines :protocol where the server has allowed it",
    ),
    Difference(
        "request: two content-lengths",
        _MALFORMED,
        _TAKEN_UNFINISHED,
        "RFC 9110 8.6: more than one value may be refused as invalid",
    ),
    Difference(
        "request: no authority", _TAKEN, _ENDED, "8.3.1: :authority may be left out, and a server need not ask for it"
    ),
    Difference(
        "request: host equal to authority",
        _TAKEN,
        _ENDED,
        "8.3.1: malformed if host names another entity; RFC 3986 3.2.2: case does not matter",
    ),
    # HPACK.
    Difference(
        "block: *",
        "GOAWAY COMPRESSION_ERROR, acks 0/1; nothing seen",
        _ENDED,
        "4.3: a decoding error MUST be treated as a connection error of type COMPRESSION_ERROR",
    ),
    # Stream errors and connection errors kept apart.
    Difference(
        "WINDOW_UPDATE of 0 on a stream",
        _MALFORMED_LATER,
        _ENDED_LATER,
        "6.9: an increment of 0 MUST be treated as a stream error",
    ),
    Difference(
        "PRIORITY of * bytes",
        "RST_STREAM 1 FRAME_SIZE_ERROR, acks 0/1; request 1, request 99, end 99",
        "GOAWAY FRAME_SIZE_ERROR, acks 0/1; request 1",
        "6.3: MUST be treated as a stream error of type FRAME_SIZE_ERROR",
    ),
    Difference(
        "more streams than allowed",
        "RST_STREAM 9 REFUSED_STREAM, acks 0/1; request 1, end 1, request 3, end 3, request 5, end 5, request 7, end 7",
        "GOAWAY PROTOCOL_ERROR, acks 0/1; request 1, end 1, request 3, end 3, request 5, end 5, request 7, end 7",
        "5.1.2: MUST be treated as a stream error of type PROTOCOL_ERROR or REFUSED_STREAM",
    ),
    Difference(
        "RST_STREAM on an idle stream",
        _ENDED_LATER,
        _TAKEN_UNFINISHED,
        "6.4: MUST be treated as a connection error of type PROTOCOL_ERROR",
    ),
    Difference(
        "RST_STREAM on an even stream",
        "GOAWAY PROTOCOL_ERROR, acks 0/1; request 5",
        "acks 0/1; request 5, request 99, end 99",
        "6.4, as above: a stream that we have not opened is idle",
    ),
    Difference(
        "CONTINUATION on a stream that was skipped",
        "GOAWAY PROTOCOL_ERROR, acks 0/1; request 5",
        "GOAWAY STREAM_CLOSED, acks 0/1; request 5",
        "6.10: CONTINUATION of nothing MUST be treated as a connection error of type PROTOCOL_ERROR",
    ),
    Difference(
        "a SETTINGS ack with a payload",
        "GOAWAY FRAME_SIZE_ERROR, acks 0/1; nothing seen",
        _ENDED,
        "6.5: MUST be treated as a connection error of type FRAME_SIZE_ERROR",
    ),
    # Closed streams.
    Difference(
        "HEADERS after the peer's RST_STREAM",
        "GOAWAY STREAM_CLOSED, acks 0/1; request 1, reset by the peer 1",
        "RST_STREAM 1 STREAM_CLOSED, acks 0/1; request 1, reset by the peer 1, request 99, end 99",
        "5.1: frames on a closed stream MAY be treated as a connection error of type STREAM_CLOSED; nothing can have been in flight",
    ),
    Difference(
        "* after our RST_STREAM",
        "RST_STREAM 1 CANCEL, acks 0/1; request 1, request 99, end 99",
        "RST_STREAM 1 CANCEL, RST_STREAM 1 STREAM_CLOSED, acks 0/1; request 1, request 99, end 99",
        "5.1: what was in flight to a stream that we reset MUST be minimally processed and then discarded",
    ),
    # GOAWAY.
    Difference(
        "GOAWAY",
        "acks 0/1; request 1, goaway 0, data 1, end 1, request 99, end 99",
        "GOAWAY PROTOCOL_ERROR, acks 0/1; request 1, goaway 0",
        "6.8: streams in flight can finish; it is the receiver that must open no more",
    ),
    Difference(
        "a body that ends after our GOAWAY",
        "GOAWAY NO_ERROR, acks 0/1; request 1, data 1, end 1",
        "GOAWAY NO_ERROR, GOAWAY PROTOCOL_ERROR, acks 0/1; request 1",
        "6.8: activity on streams up to the last one might still complete",
    ),
    Difference(
        "a stream opened after our GOAWAY",
        "GOAWAY NO_ERROR, acks 0/1; request 1",
        "GOAWAY NO_ERROR, GOAWAY PROTOCOL_ERROR, acks 0/1; request 1",
        "6.8: frames of streams above the last one can be ignored, their shared state kept",
    ),
    # Priority.
    Difference(
        "a stream that depends on itself, in HEADERS",
        _TAKEN,
        _ENDED,
        "5.3.2: the scheme, with its rule of RFC 7540 5.3.1, is deprecated",
    ),
    Difference(
        "a stream that depends on itself, in PRIORITY",
        "acks 0/1; request 99, end 99",
        _ENDED,
        "5.3.2: the scheme, with its rule of RFC 7540 5.3.1, is deprecated",
    ),
    # The start, and what is delivered.
    Difference(
        "good frames before a bad one in one read",
        "GOAWAY PROTOCOL_ERROR, acks 0/1; request 1, data 1",
        _ENDED,
        "5.4.1: an error ends what comes after it; how reads are cut must not decide what came before",
    ),
    Difference(
        "no preface",
        "GOAWAY PROTOCOL_ERROR; nothing seen",
        "nothing said; nothing seen",
        "3.4: MUST be treated as a connection error of type PROTOCOL_ERROR; GOAWAY may be left out",
    ),
    Difference(
        "a SETTINGS ack after the preface",
        "GOAWAY PROTOCOL_ERROR; nothing seen",
        "nothing said; nothing seen",
        "3.4: the preface MUST be followed by a SETTINGS frame",
    ),
    Difference(
        "no SETTINGS after the preface",
        "GOAWAY PROTOCOL_ERROR; nothing seen",
        "acks 1/0; nothing seen",
        "3.4: the preface MUST be followed by a SETTINGS frame",
    ),
]
