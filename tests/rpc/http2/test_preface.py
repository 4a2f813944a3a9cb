"""Protects how a connection begins (RFC 9113 3.4) and how its bytes are cut into frames (RFC 9113 4.1, 4.2)."""

from __future__ import annotations

import pytest

from tests.rpc.http2.wire import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    SETTINGS,
    WINDOW_UPDATE,
    Client,
    data,
    frame,
    headers,
    ping,
    read_frames,
    settings,
)
from trio_frontend.rpc import http2


def fresh() -> http2.Connection:
    return http2.Connection(http2.Limits())


def failure(events: list[http2.Event]) -> http2.ProtocolError:
    assert isinstance(events[-1], http2.ConnectionFailed)
    return events[-1].error


def test_our_settings_are_the_first_frame_and_state_our_bounds() -> None:
    limits = http2.Limits(
        max_concurrent_streams=7, stream_window=70_000, connection_window=100_000, max_header_list_size=9_000
    )
    first, second = read_frames(http2.Connection(limits).take_output())
    assert (first.kind, first.flags, first.stream_id) == (SETTINGS, 0, 0)
    pairs = {
        int.from_bytes(first.payload[i : i + 2], "big"): int.from_bytes(first.payload[i + 2 : i + 6], "big")
        for i in range(0, len(first.payload), 6)
    }
    assert pairs == {3: 7, 4: 70_000, 5: 16_384, 6: 9_000}
    assert (second.kind, second.stream_id) == (WINDOW_UPDATE, 0)
    assert int.from_bytes(second.payload, "big") == 100_000 - 65_535


def test_a_connection_window_of_the_default_size_needs_no_window_update() -> None:
    connection = http2.Connection(http2.Limits(connection_window=65_535))
    assert [f.kind for f in read_frames(connection.take_output())] == [SETTINGS]


def test_the_peers_settings_are_acknowledged() -> None:
    connection = fresh()
    connection.take_output()
    assert connection.receive_data(PREFACE + settings(), 0.0) == []
    assert read_frames(connection.take_output()) == [(SETTINGS, ACK, 0, b"")]


def test_another_protocol_is_refused_at_its_first_wrong_byte() -> None:
    connection = fresh()
    assert connection.receive_data(b"P", 0.0) == []
    assert connection.receive_data(b"R", 0.0) == []
    assert failure(connection.receive_data(b"E", 0.0)).code == PROTOCOL_ERROR
    assert read_frames(connection.take_output())[-1].kind == GOAWAY


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", PREFACE[:-1] + b"\r", b"\0" * 24])
def test_what_is_not_the_preface_is_refused(hello: bytes) -> None:
    assert failure(fresh().receive_data(hello, 0.0)).code == PROTOCOL_ERROR


@pytest.mark.parametrize("first", [ping(), headers(1), frame(SETTINGS, ACK), data(1, b"x"), frame(0x55)])
def test_the_first_frame_must_be_settings(first: bytes) -> None:
    assert failure(fresh().receive_data(PREFACE + first, 0.0)).code == PROTOCOL_ERROR


CONVERSATION = (
    PREFACE
    + settings([(4, 1_000)])
    + headers(1)
    + data(1, b"hello")
    + data(1, b"", END_STREAM)
    + ping()
    + frame(0xBE, 0xFF, 3, b"unknown")
    + headers(3, flags=END_HEADERS | END_STREAM)
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 10, 24, 33, 1_000])
def test_reads_may_cut_frames_anywhere(size: int) -> None:
    whole, cut = fresh(), fresh()
    expected = whole.receive_data(CONVERSATION, 0.0)
    events = [
        event
        for start in range(0, len(CONVERSATION), size)
        for event in cut.receive_data(CONVERSATION[start : start + size], 0.0)
    ]
    assert len(expected) == 4
    assert events == expected
    assert cut.take_output() == whole.take_output()


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_bytes_like_object_may_be_given(kind: type) -> None:
    whole, other = fresh(), fresh()
    assert other.receive_data(kind(CONVERSATION), 0.0) == whole.receive_data(CONVERSATION, 0.0)


def test_an_empty_read_means_nothing() -> None:
    assert fresh().receive_data(b"", 0.0) == []


def test_a_frame_of_the_largest_size_is_taken() -> None:
    client = Client()
    client.open(1)
    [event] = client.send(data(1, b"x" * 16_384))
    assert isinstance(event, http2.DataReceived)
    assert event.flow_controlled_length == 16_384


@pytest.mark.parametrize("kind", [DATA, HEADERS, SETTINGS, PING, GOAWAY, 0x77])
def test_a_frame_that_is_too_long_is_refused_at_its_header(kind: int) -> None:
    client = Client()
    client.open(1)
    header_only = frame(kind, 0, 1, b"x" * 16_385)[:9]
    assert client.send(header_only[:8]) == []
    client.send(header_only[8:])
    assert client.failure() == FRAME_SIZE_ERROR


def test_a_larger_frame_size_can_be_allowed() -> None:
    client = Client(max_frame_size=20_000)
    client.open(1)
    [event] = client.send(data(1, b"x" * 20_000))
    assert isinstance(event, http2.DataReceived)


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    client = Client()
    [event] = client.send(headers(1 | 1 << 31))
    assert isinstance(event, http2.RequestReceived)
    assert event.stream_id == 1


def test_the_good_events_before_an_error_are_delivered_with_it() -> None:
    client = Client()
    events = client.send(headers(1), data(1, b"good"), frame(SETTINGS, 0, 1))
    assert [type(event) for event in events] == [http2.RequestReceived, http2.DataReceived, http2.ConnectionFailed]
    assert client.failure() == PROTOCOL_ERROR


def test_nothing_is_taken_or_said_after_a_failure() -> None:
    client = Client()
    client.open(1)
    client.send(frame(SETTINGS, 0, 1))
    assert client.failure() == PROTOCOL_ERROR
    assert client.send(headers(3), ping()) == []
    client.connection.ping(b"12345678")
    client.connection.go_away(0)
    client.connection.reset_stream(1, 0)
    client.connection.acknowledge(1, 5)
    assert not client.connection.try_send_message(1, b"\0\0\0\0\0", b"")
    with pytest.raises(http2.StreamClosed):
        client.connection.send_headers(1, b"", end_stream=True)
    assert client.connection.receive_eof() == []
    assert client.connection.open_streams == 0
    assert client.sent() == []


def test_a_short_frame_after_a_long_one_is_taken_as_soon_as_it_is_there() -> None:
    client = Client()
    client.open(1)
    long = data(1, b"x" * 10_000)
    client.send(long[:5_000])
    assert len(client.send(long[5_000:])) == 1
    short = data(1, b"y")
    assert client.send(short[:5]) == []
    assert client.send(short[5:]) == [http2.DataReceived(1, b"y", 1, False)]


def test_whether_settings_have_come_and_something_is_unfinished_can_be_asked() -> None:
    connection = fresh()
    states = []
    for piece in (
        b"",
        PREFACE[:3],
        PREFACE[3:],
        settings()[:4],
        settings()[4:],
        headers(1, flags=0),
        frame(9, END_HEADERS, 1),
    ):
        connection.receive_data(piece, 0.0)
        states.append((connection.settings_received, connection.unfinished))
    waiting, idle = (False, True), (True, False)
    assert states == [waiting, waiting, (False, False), waiting, idle, (True, True), idle]


def test_whether_the_last_read_completed_a_frame_can_be_asked() -> None:
    """A client that trickles the bytes of one frame, or the pieces of one header block, makes no progress."""
    connection = fresh()
    states = []
    for piece in (
        PREFACE + settings(),
        ping()[:5],
        ping()[5:9],
        ping()[9:],
        headers(1, flags=0),
        frame(9, 0, 1),
        frame(9, END_HEADERS, 1),
        ping()[:9],
        ping()[9:] + ping()[:5],
        ping()[5:6],
    ):
        connection.receive_data(piece, float(len(states)))
        states.append(connection.progressed)
    assert states == [True, False, False, True, False, False, True, False, True, False]


def test_the_end_of_input_between_frames_is_no_error() -> None:
    client = Client()
    client.open(1)
    assert client.connection.receive_eof() == []
    assert client.send(headers(3)) == []
    assert client.connection.open_streams == 1


@pytest.mark.parametrize("rest", [headers(1)[:-1], headers(1)[:5], headers(1, flags=0)])
def test_the_end_of_input_inside_a_frame_or_header_block_is_an_error(rest: bytes) -> None:
    client = Client()
    client.send(rest)
    client.events += client.connection.receive_eof()
    assert client.failure() == PROTOCOL_ERROR
