"""Protects the states of a stream (RFC 9113 5.1, 8.1): what may come when, and what a wrong frame costs."""

from __future__ import annotations

import pytest

from tests.rpc.http2.wire import (
    CANCEL,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RESPONSE,
    RST_STREAM,
    STREAM_CLOSED,
    TRAILERS,
    Client,
    data,
    frame,
    headers,
    reset_code,
    rst_stream,
    window_update,
)
from trio_frontend.rpc import http2


@pytest.fixture
def client() -> Client:
    return Client()


def test_a_request_is_announced_with_its_fields(client: Client) -> None:
    [event] = client.send(headers(1, flags=END_HEADERS | END_STREAM))
    assert isinstance(event, http2.RequestReceived)
    assert event.end_stream
    assert event.headers[:3] == [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/pkg.Service/Method")]
    assert client.connection.open_streams == 1


def test_a_body_comes_in_order_and_ends_with_its_last_frame(client: Client) -> None:
    events = client.send(headers(1), data(1, b"a"), data(1, b"b", END_STREAM))
    assert events[1:] == [http2.DataReceived(1, b"a", 1, False), http2.DataReceived(1, b"b", 1, True)]


def test_trailers_end_a_request(client: Client) -> None:
    events = client.send(headers(1), data(1, b"a"), headers(1, [(b"grpc-checksum", b"7")], END_HEADERS | END_STREAM))
    assert events[2:] == [http2.TrailersReceived(1, [(b"grpc-checksum", b"7")])]
    assert client.still_serves(3)


def test_the_response_ends_the_stream(client: Client) -> None:
    client.send(headers(1, flags=END_HEADERS | END_STREAM))
    client.connection.send_headers(1, RESPONSE)
    client.connection.send_headers(1, TRAILERS, end_stream=True)
    assert [(f.kind, f.flags) for f in client.sent()] == [(HEADERS, END_HEADERS), (HEADERS, END_HEADERS | END_STREAM)]
    assert client.connection.open_streams == 0


def test_a_response_that_ends_before_its_request_stops_it_with_no_error(client: Client) -> None:
    client.send(headers(1))
    client.connection.send_headers(1, TRAILERS, end_stream=True)
    sent = client.sent()
    assert [f.kind for f in sent] == [HEADERS, RST_STREAM]
    assert reset_code(sent, 1) == NO_ERROR
    assert client.connection.open_streams == 0
    assert client.send(data(1, b"in flight"), headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM)) == []
    assert client.sent() == []


def test_the_peers_reset_ends_its_stream_only(client: Client) -> None:
    client.open(1, 3)
    assert client.send(rst_stream(1, 0xDEAD)) == [http2.StreamReset(1, 0xDEAD, True)]
    assert client.connection.open_streams == 1
    assert client.sent() == []
    assert client.send(data(3, b"x")) == [http2.DataReceived(3, b"x", 1, False)]


@pytest.mark.parametrize(
    "wrong",
    [data(3, b"x"), rst_stream(3), window_update(3, 1)],
    ids=["DATA", "RST_STREAM", "WINDOW_UPDATE"],
)
def test_frames_on_an_idle_stream_end_the_connection(client: Client, wrong: bytes) -> None:
    client.open(1)
    client.send(wrong)
    assert client.failure() == PROTOCOL_ERROR


@pytest.mark.parametrize(
    "wrong",
    [headers(2), data(2, b"x"), rst_stream(2), window_update(2, 1)],
    ids=["HEADERS", "DATA", "RST_STREAM", "WINDOW_UPDATE"],
)
def test_frames_on_an_even_stream_end_the_connection(client: Client, wrong: bytes) -> None:
    client.open(1, 3, 5)
    client.send(wrong)
    assert client.failure() == PROTOCOL_ERROR


@pytest.mark.parametrize("wrong", [headers(0), data(0, b"x"), rst_stream(0)], ids=["HEADERS", "DATA", "RST_STREAM"])
def test_frames_of_a_stream_on_stream_0_end_the_connection(client: Client, wrong: bytes) -> None:
    client.send(wrong)
    assert client.failure() == PROTOCOL_ERROR


def test_a_client_cannot_push(client: Client) -> None:
    client.open(1)
    client.send(frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"))
    assert client.failure() == PROTOCOL_ERROR


@pytest.mark.parametrize(
    "wrong",
    [data(1, b"x"), data(1, b"", END_STREAM), headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM)],
    ids=["DATA", "END_STREAM", "HEADERS"],
)
@pytest.mark.parametrize("by_trailers", [False, True])
def test_more_of_a_request_after_its_end_costs_the_stream(client: Client, wrong: bytes, by_trailers: bool) -> None:
    if by_trailers:
        client.send(headers(1), headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM))
    else:
        client.send(headers(1, flags=END_HEADERS | END_STREAM))
    assert client.send(wrong) == [http2.StreamReset(1, STREAM_CLOSED, False)]
    assert reset_code(client.sent(), 1) == STREAM_CLOSED
    assert client.still_serves(3)


def test_window_updates_and_resets_of_a_request_that_has_ended_are_in_order(client: Client) -> None:
    client.send(headers(1, flags=END_HEADERS | END_STREAM))
    assert client.send(window_update(1, 5)) == []
    assert client.sent() == []
    assert client.send(rst_stream(1)) == [http2.StreamReset(1, CANCEL, True)]


def test_data_on_a_closed_stream_is_a_stream_error(client: Client) -> None:
    client.open(1)
    client.send(rst_stream(1))
    assert client.send(data(1, b"x")) == []
    assert reset_code(client.sent(), 1) == STREAM_CLOSED
    assert client.send(data(1, b"x")) == []
    assert client.sent() == [], "one answer is enough"
    assert client.still_serves(3)


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (headers(1, flags=END_HEADERS | END_STREAM), STREAM_CLOSED),
        (headers(1) + rst_stream(1), STREAM_CLOSED),
        (headers(1) + rst_stream(1) + headers(3), PROTOCOL_ERROR),
        (headers(3), PROTOCOL_ERROR),
    ],
    ids=["ended", "reset by the peer", "reset, and a later one opened", "skipped"],
)
def test_a_closed_stream_cannot_be_opened_again(client: Client, before: bytes, code: int) -> None:
    client.send(before)
    if code == STREAM_CLOSED and client.connection.open_streams:
        client.connection.send_headers(1, TRAILERS, end_stream=True)
    client.send(headers(1))
    assert client.failure() == code


@pytest.mark.parametrize("late", [rst_stream(1), window_update(1, 7)], ids=["RST_STREAM", "WINDOW_UPDATE"])
def test_frames_that_crossed_the_end_of_a_stream_are_ignored(client: Client, late: bytes) -> None:
    assert client.still_serves(1)
    assert client.send(late) == []
    assert client.sent() == []
    assert client.still_serves(3)


def test_what_was_in_flight_to_a_stream_we_reset_is_ignored(client: Client) -> None:
    client.open(1)
    client.connection.reset_stream(1, CANCEL)
    assert reset_code(client.sent(), 1) == CANCEL
    late = [data(1, b"x"), window_update(1, 1), headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM), rst_stream(1)]
    assert client.send(*late) == []
    assert client.sent() == []
    assert client.still_serves(3)


def test_resetting_a_closed_stream_says_nothing(client: Client) -> None:
    client.open(1)
    client.connection.reset_stream(1, CANCEL)
    client.connection.reset_stream(1, CANCEL)
    client.connection.reset_stream(99, CANCEL)
    assert len(client.sent()) == 1


def test_trailers_that_do_not_end_the_request_cost_the_stream(client: Client) -> None:
    client.open(1)
    assert client.send(headers(1, [(b"a", b"b")])) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
    assert reset_code(client.sent(), 1) == PROTOCOL_ERROR
    assert client.still_serves(3)


def test_one_stream_too_many_is_refused_and_the_others_go_on() -> None:
    client = Client(max_concurrent_streams=2)
    client.open(1, 3)
    assert client.send(headers(5)) == []
    assert reset_code(client.sent(), 5) == REFUSED_STREAM
    assert client.send(data(3, b"x")) == [http2.DataReceived(3, b"x", 1, False)]
    client.send(rst_stream(1))
    assert client.still_serves(7)


def test_a_refused_streams_header_block_still_updates_the_table() -> None:
    client = Client(max_concurrent_streams=1)
    client.open(1)
    indexed = b"\x40\x01x\x01y"  # x: y, with incremental indexing: entry 62
    client.send(frame(HEADERS, END_HEADERS, 3, indexed))
    client.connection.reset_stream(1, CANCEL)
    request = frame(HEADERS, END_HEADERS | END_STREAM, 5, headers(5)[9:] + b"\xbe")
    [event] = client.send(request)
    assert isinstance(event, http2.RequestReceived)
    assert event.headers[-1] == (b"x", b"y")


class TestGoAway:
    """RFC 9113 6.8."""

    def test_a_graceful_end_names_first_every_stream_then_the_last(self, client: Client) -> None:
        client.open(1)
        client.connection.go_away(NO_ERROR, 2**31 - 1)
        client.open(3)
        client.connection.go_away(NO_ERROR, debug=b"bye")
        [last] = client.sent()
        assert last == (GOAWAY, 0, 0, b"\0\0\0\3" + b"\0\0\0\0" + b"bye")

    def test_streams_in_flight_finish_and_later_ones_are_ignored(self, client: Client) -> None:
        client.open(1)
        client.connection.go_away(NO_ERROR)
        client.sent()
        assert client.send(headers(3), data(3, b"x"), data(1, b"y")) == [http2.DataReceived(1, b"y", 1, False)]
        assert client.send(window_update(3, 1), rst_stream(3), headers(3, [(b"a", b"b")])) == []
        assert client.sent() == []
        client.connection.send_headers(1, TRAILERS, end_stream=True)
        assert client.sent()[0].stream_id == 1

    def test_ignored_streams_still_count_for_what_both_sides_share(self, client: Client) -> None:
        client.connection.go_away(NO_ERROR)
        client.send(frame(HEADERS, END_HEADERS, 1, b"\x40\x01x\x01y"))
        client.sent()
        for _ in range(4 * client.limits.connection_window // 16_384):
            assert client.send(data(1, b"x" * 16_384)) == []
        returned = sum(int.from_bytes(f.payload, "big") for f in client.sent())
        assert returned >= 3 * client.limits.connection_window

    def test_the_last_stream_never_rises(self, client: Client) -> None:
        client.open(1, 3)
        client.connection.go_away(NO_ERROR, 1)
        client.connection.go_away(NO_ERROR, 3)
        assert [f.payload[:4] for f in client.sent()] == [b"\0\0\0\1", b"\0\0\0\1"]

    def test_the_peers_goaway_is_told_and_its_streams_finish(self, client: Client) -> None:
        client.open(1)
        event = frame(GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\2debug")
        assert client.send(event) == [http2.GoAwayReceived(0, 2, b"debug")]
        assert client.send(data(1, b"y", END_STREAM)) == [http2.DataReceived(1, b"y", 1, True)]
        client.connection.send_headers(1, TRAILERS, end_stream=True)
        assert client.sent()[-1].kind == HEADERS

    def test_a_failures_goaway_names_the_last_stream_and_the_reason(self, client: Client) -> None:
        client.open(1, 3)
        client.send(frame(0x6, 0, 1, bytes(8)))
        last = client.sent()[-1]
        assert last.payload == b"\0\0\0\3" + b"\0\0\0\1" + b"PING on a stream"
