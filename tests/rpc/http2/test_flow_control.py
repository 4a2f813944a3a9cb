"""Protects flow control both ways (RFC 9113 5.2, 6.9): windows kept, given back in batches, negative, and overflowing."""

from __future__ import annotations

import pytest

from tests.rpc.http2.wire import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PROTOCOL_ERROR,
    RESPONSE,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    Client,
    Frame,
    data,
    frame,
    headers,
    padded,
    reset_code,
    rst_stream,
    settings,
    window_update,
)
from trio_frontend.rpc import http2

MAX_WINDOW = 2**31 - 1


@pytest.fixture
def client() -> Client:
    client = Client(stream_window=65_535, connection_window=131_072)
    client.open(1)
    return client


def updates(frames: list[Frame]) -> list[tuple[int, int]]:
    return [(f.stream_id, int.from_bytes(f.payload, "big")) for f in frames if f.kind == WINDOW_UPDATE]


def fill(client: Client, stream_id: int, n: int) -> list[http2.Event]:
    return client.send(*(data(stream_id, b"x" * min(16_384, n - start)) for start in range(0, n, 16_384)))


class TestReceiving:
    def test_a_streams_window_may_be_used_to_its_last_byte(self, client: Client) -> None:
        assert len(fill(client, 1, 65_535)) == 4
        assert client.sent() == []

    def test_one_byte_more_costs_the_stream(self, client: Client) -> None:
        client.open(3)
        fill(client, 1, 65_535)
        assert client.send(data(1, b"x")) == [http2.StreamReset(1, FLOW_CONTROL_ERROR, False)]
        assert reset_code(client.sent(), 1) == FLOW_CONTROL_ERROR
        assert client.send(data(3, b"x")) == [http2.DataReceived(3, b"x", 1, False)]

    def test_one_byte_more_than_the_connections_window_costs_the_connection(self, client: Client) -> None:
        client.open(3, 5)
        fill(client, 1, 65_535)
        fill(client, 3, 65_535)
        client.send(data(5, b"xx"))
        client.send(data(5, b"x"))
        assert client.failure() == FLOW_CONTROL_ERROR

    def test_what_is_acknowledged_is_given_back_in_batches(self, client: Client) -> None:
        fill(client, 1, 65_535)
        client.connection.acknowledge(1, 30_000)
        assert client.sent() == []
        client.connection.acknowledge(1, 5_000)
        assert updates(client.sent()) == [(1, 35_000)]
        fill(client, 1, 35_000)
        assert client.connection.open_streams == 1
        client.connection.acknowledge(1, 65_535)
        assert sorted(updates(client.sent())) == [(0, 100_535), (1, 65_535)]

    def test_a_stream_can_receive_for_ever_if_it_is_acknowledged(self, client: Client) -> None:
        for _ in range(200):
            [event] = client.send(data(1, b"x" * 16_384))
            assert isinstance(event, http2.DataReceived)
            client.connection.acknowledge(1, event.flow_controlled_length)

    def test_padding_counts_and_is_in_the_length_to_acknowledge(self, client: Client) -> None:
        [event] = client.send(frame(DATA, 0x8, 1, padded(b"abc", 200)))
        assert event == http2.DataReceived(1, b"abc", 204, False)

    def test_a_finished_request_gets_no_stream_window_back(self, client: Client) -> None:
        fill(client, 1, 65_000)
        client.send(data(1, b"x", END_STREAM))
        client.connection.acknowledge(1, 65_001)
        assert updates(client.sent()) == []
        client.connection.reset_stream(1, CANCEL)
        client.open(3)
        fill(client, 3, 10_000)
        client.connection.acknowledge(3, 10_000)
        assert updates(client.sent()) == [(0, 75_001)]

    @pytest.mark.parametrize("end", ["reset by the peer", "reset by us", "answered"])
    def test_what_a_stream_leaves_unread_is_given_back_when_it_closes(self, client: Client, end: str) -> None:
        given = 0
        for stream_id in (3, 5, 7, 9):
            client.open(stream_id)
            assert len(fill(client, stream_id, 65_535)) == 4
            if end == "reset by the peer":
                client.send(rst_stream(stream_id))
            elif end == "reset by us":
                client.connection.reset_stream(stream_id, CANCEL)
            else:
                client.connection.send_headers(stream_id, b"", end_stream=True)
            given += sum(n for stream_id, n in updates(client.sent()) if stream_id == 0)
        assert given == 4 * 65_535
        client.connection.acknowledge(3, 65_535)  # too late, and so nothing
        assert client.sent() == []

    def test_data_on_a_closed_stream_is_counted_and_given_back(self, client: Client) -> None:
        client.send(rst_stream(1))
        fill(client, 1, 65_536)
        sent = client.sent()
        assert updates(sent) == [(0, 65_536)]
        assert reset_code(sent, 1) == STREAM_CLOSED

    def test_nothing_may_be_acknowledged(self, client: Client) -> None:
        client.connection.acknowledge(1, 0)
        client.connection.acknowledge(99, 0)
        assert client.sent() == []

    def test_acknowledging_more_than_was_received_is_the_callers_fault(self, client: Client) -> None:
        client.send(data(1, b"xyz"))
        with pytest.raises(http2.LocalProtocolError, match="4 bytes"):
            client.connection.acknowledge(1, 4)
        with pytest.raises(http2.LocalProtocolError, match="-1 bytes"):
            client.connection.acknowledge(1, -1)


class TestSending:
    def test_a_peers_windows_are_65535_until_it_says_otherwise(self, client: Client) -> None:
        assert client.connection.sendable(1) == 65_535
        client.connection.send_data(1, b"x" * 65_535)
        assert client.connection.sendable(1) == 0
        with pytest.raises(http2.LocalProtocolError, match="window is 0"):
            client.connection.send_data(1, b"x")

    def test_the_smaller_of_both_windows_counts(self, client: Client) -> None:
        client.send(window_update(1, 1_000))
        assert client.connection.sendable(1) == 65_535
        client.send(window_update(0, 500))
        assert client.connection.sendable(1) == 66_035

    def test_the_peers_initial_window_is_that_of_new_streams(self, client: Client) -> None:
        client.send(settings([(INITIAL_WINDOW_SIZE, 10)]), headers(3))
        assert client.connection.sendable(3) == 10

    def test_a_closed_stream_can_send_nothing(self, client: Client) -> None:
        assert client.connection.sendable(3) == 0
        assert not client.connection.try_send_message(3, b"\0\0\0\0\0", b"")
        with pytest.raises(http2.StreamClosed):
            client.connection.send_data(3, b"x")

    def test_a_window_update_reopens_a_stream(self, client: Client) -> None:
        client.connection.send_data(1, b"x" * 65_535)
        assert client.send(window_update(1, 10)) == [http2.WindowUpdated(1)]
        assert client.connection.sendable(1) == 0
        assert client.send(window_update(0, 5)) == [http2.WindowUpdated(0)]
        assert client.connection.sendable(1) == 5

    def test_only_a_window_that_opens_is_told(self, client: Client) -> None:
        """A client may update windows at will; nobody waits for a window that is open."""
        client.open(3)
        assert client.send(window_update(1, 5), window_update(0, 5), settings([(INITIAL_WINDOW_SIZE, 65_540)])) == []
        client.connection.send_data(1, b"x" * 65_540)
        assert client.connection.sendable(3) == 0
        assert client.send(window_update(1, 1)) == []
        assert client.send(window_update(0, 1), window_update(0, 1)) == [http2.WindowUpdated(0)]
        assert client.connection.sendable(3) == 2
        client.send(settings([(INITIAL_WINDOW_SIZE, 0)]))
        assert client.send(settings([(INITIAL_WINDOW_SIZE, 1)])) == [http2.WindowUpdated(3)]

    def test_a_lowered_initial_window_may_make_windows_negative(self, client: Client) -> None:
        client.connection.send_data(1, b"x" * 1_000)
        client.sent()
        client.send(settings([(INITIAL_WINDOW_SIZE, 100)]))
        assert client.connection.sendable(1) == -900
        assert not client.connection.try_send_message(1, b"\0\0\0\0\0", b"")
        with pytest.raises(http2.LocalProtocolError):
            client.connection.send_data(1, b"x")
        assert client.send(window_update(1, 900)) == [], "a window of 0 is not open"
        assert client.connection.sendable(1) == 0
        assert client.send(settings([(INITIAL_WINDOW_SIZE, 200)])) == [http2.WindowUpdated(1)]
        assert client.connection.sendable(1) == 100
        client.connection.send_data(1, b"x" * 100)

    def test_an_empty_end_of_stream_needs_no_window(self, client: Client) -> None:
        client.connection.send_data(1, b"x" * 1_000)
        client.send(data(1, b"", END_STREAM), settings([(INITIAL_WINDOW_SIZE, 0)]))
        assert client.connection.sendable(1) == -1_000
        client.sent()
        client.connection.send_data(1, b"", end_stream=True)
        assert client.sent() == [(DATA, END_STREAM, 1, b"")]

    def test_trailers_need_no_window(self, client: Client) -> None:
        client.connection.send_data(1, b"x" * 65_535)
        client.connection.send_headers(1, RESPONSE, end_stream=True)
        assert client.connection.open_streams == 0

    def test_long_data_is_split_by_the_peers_frame_size(self, client: Client) -> None:
        body = bytes(i % 251 for i in range(40_000))
        client.connection.send_data(1, body, end_stream=False)
        frames = client.sent()
        assert [len(f.payload) for f in frames] == [16_384, 16_384, 7_232]
        assert b"".join(f.payload for f in frames) == body

    def test_only_the_last_frame_ends_the_stream(self, client: Client) -> None:
        client.send(data(1, b"", END_STREAM))
        client.connection.send_data(1, b"x" * 32_768, end_stream=True)
        assert [(len(f.payload), f.flags) for f in client.sent()] == [(16_384, 0), (16_384, END_STREAM)]
        assert client.connection.open_streams == 0

    def test_a_larger_frame_size_of_the_peer_is_not_used_up(self, client: Client) -> None:
        client.send(settings([(MAX_FRAME_SIZE, 2**24 - 1)]))
        client.sent()
        client.connection.send_data(1, b"x" * 20_000)
        assert [len(f.payload) for f in client.sent()] == [16_384, 3_616]


class TestWindowUpdate:
    def test_an_increment_of_0_on_a_stream_costs_the_stream(self, client: Client) -> None:
        assert client.send(window_update(1, 0)) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
        assert reset_code(client.sent(), 1) == PROTOCOL_ERROR
        assert client.still_serves(3)

    def test_an_increment_of_0_on_the_connection_costs_the_connection(self, client: Client) -> None:
        client.send(window_update(0, 0))
        assert client.failure() == PROTOCOL_ERROR

    def test_the_reserved_bit_of_an_increment_is_ignored(self, client: Client) -> None:
        client.send(window_update(0, 2**31 | 5))
        client.send(window_update(1, 2**31 | 5))
        assert client.connection.sendable(1) == 65_540

    def test_a_stream_window_above_the_largest_costs_the_stream(self, client: Client) -> None:
        assert client.send(window_update(1, MAX_WINDOW - 65_535)) == []
        assert client.send(window_update(1, 1)) == [http2.StreamReset(1, FLOW_CONTROL_ERROR, False)]
        assert reset_code(client.sent(), 1) == FLOW_CONTROL_ERROR
        assert client.still_serves(3)

    def test_a_connection_window_above_the_largest_costs_the_connection(self, client: Client) -> None:
        assert client.send(window_update(0, MAX_WINDOW - 65_535)) == []
        client.send(window_update(0, 1))
        assert client.failure() == FLOW_CONTROL_ERROR

    @pytest.mark.parametrize("stream_id", [0, 1])
    @pytest.mark.parametrize("length", [0, 3, 5])
    def test_a_wrong_length_costs_the_connection(self, client: Client, stream_id: int, length: int) -> None:
        client.send(frame(WINDOW_UPDATE, 0, stream_id, bytes(length)))
        assert client.failure() == FRAME_SIZE_ERROR


class TestInitialWindowSize:
    def test_the_largest_is_allowed_and_one_more_is_not(self, client: Client) -> None:
        assert client.send(settings([(INITIAL_WINDOW_SIZE, MAX_WINDOW)])) == []
        assert client.sent() == [(SETTINGS, ACK, 0, b"")]
        client.send(settings([(INITIAL_WINDOW_SIZE, MAX_WINDOW + 1)]))
        assert client.failure() == FLOW_CONTROL_ERROR

    def test_a_change_that_takes_a_window_above_the_largest_costs_the_connection(self, client: Client) -> None:
        client.send(window_update(1, 1), settings([(INITIAL_WINDOW_SIZE, MAX_WINDOW)]))
        assert client.failure() == FLOW_CONTROL_ERROR

    def test_it_does_not_change_the_connections_window(self, client: Client) -> None:
        client.send(settings([(INITIAL_WINDOW_SIZE, 1_000_000)]))
        assert client.connection.sendable(1) == 65_535

    def test_the_last_of_several_in_one_frame_counts(self, client: Client) -> None:
        client.send(settings([(INITIAL_WINDOW_SIZE, 5), (INITIAL_WINDOW_SIZE, 7)]))
        assert client.connection.sendable(1) == 7


def test_an_unfinished_requests_stream_window_is_given_back_before_the_response() -> None:
    client = Client(stream_window=65_535)
    client.send(headers(1, flags=END_HEADERS))
    fill(client, 1, 40_000)
    client.connection.acknowledge(1, 40_000)
    assert updates(client.sent()) == [(1, 40_000)]
