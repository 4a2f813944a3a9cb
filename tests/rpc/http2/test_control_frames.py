"""Protects the frames that carry no request: SETTINGS, PING, RST_STREAM, PRIORITY, GOAWAY, unknown ones (RFC 9113 4.1, 5.3, 5.5, 6)."""

from __future__ import annotations

import hpack
import pytest

from tests.rpc.http2.wire import (
    ACK,
    CONTINUATION,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    PADDED,
    PING,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    REQUEST,
    RESPONSE,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    Client,
    block,
    data,
    frame,
    goaway,
    headers,
    padded,
    ping,
    reset_code,
    settings,
)
from trio_frontend.rpc import http2


@pytest.fixture
def client() -> Client:
    client = Client()
    client.open(1)
    return client


class TestSettings:
    def test_every_frame_of_them_is_acknowledged_once(self, client: Client) -> None:
        client.send(settings([(INITIAL_WINDOW_SIZE, 1)]), settings([(MAX_CONCURRENT_STREAMS, 0)]), settings())
        assert client.sent() == [(SETTINGS, ACK, 0, b"")] * 3

    def test_an_acknowledgement_is_not_acknowledged(self, client: Client) -> None:
        assert client.send(frame(SETTINGS, ACK)) == []
        assert client.sent() == []

    def test_unknown_ones_are_ignored(self, client: Client) -> None:
        assert client.send(settings([(0, 1), (0xFFFF, 2**32 - 1), (0x10, 7), (MAX_HEADER_LIST_SIZE, 0)])) == []
        assert client.sent() == [(SETTINGS, ACK, 0, b"")]

    @pytest.mark.parametrize("value", [0, 1])
    def test_push_may_be_allowed_or_not(self, client: Client, value: int) -> None:
        assert client.send(settings([(ENABLE_PUSH, value)])) == []

    @pytest.mark.parametrize(
        ("key", "value"), [(ENABLE_PUSH, 2), (MAX_FRAME_SIZE, 16_383), (MAX_FRAME_SIZE, 2**24), (MAX_FRAME_SIZE, 0)]
    )
    def test_values_out_of_range_end_the_connection(self, client: Client, key: int, value: int) -> None:
        client.send(settings([(key, value)]))
        assert client.failure() == PROTOCOL_ERROR

    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
            (frame(SETTINGS, ACK, 1), PROTOCOL_ERROR),
            (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
            (frame(SETTINGS, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
            (frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
        ],
        ids=["on a stream", "an ack on a stream", "5 bytes", "7 bytes", "an ack with a payload"],
    )
    def test_wrong_ones_end_the_connection(self, client: Client, wrong: bytes, code: int) -> None:
        client.send(wrong)
        assert client.failure() == code

    def test_a_smaller_header_table_is_answered_by_an_update_in_our_next_header_block(self, client: Client) -> None:
        """RFC 7541 4.2; hpack's decoder insists on it."""
        decoder = hpack.Decoder()
        decoder.max_allowed_table_size = 0
        client.send(settings([(HEADER_TABLE_SIZE, 0)]), settings([(HEADER_TABLE_SIZE, 5)]), headers(3))
        client.sent()
        client.connection.send_headers(1, TRAILERS, end_stream=True)
        client.send(settings([(HEADER_TABLE_SIZE, 1)]))
        client.connection.send_headers(3, RESPONSE)
        first, _reset, _ack, second = client.sent()
        assert first.payload == b"\x20" + TRAILERS
        assert second.payload == RESPONSE
        assert decoder.decode(first.payload, raw=True) == [(b"grpc-status", b"0")]
        assert decoder.decode(second.payload, raw=True)[0] == (b":status", b"200")

    @pytest.mark.parametrize("size", [4_096, 2**32 - 1])
    def test_a_larger_header_table_changes_nothing(self, client: Client, size: int) -> None:
        client.send(settings([(HEADER_TABLE_SIZE, size)]))
        client.sent()
        client.connection.send_headers(1, TRAILERS, end_stream=True)
        assert client.sent()[0].payload == TRAILERS


class TestPing:
    def test_it_is_answered_with_its_payload(self, client: Client) -> None:
        assert client.send(ping(b"\0\xff123456")) == []
        assert client.sent() == [(PING, ACK, 0, b"\0\xff123456")]

    def test_our_own_is_sent_and_its_ack_is_told(self, client: Client) -> None:
        client.connection.ping(b"abcdefgh")
        assert client.sent() == [(PING, 0, 0, b"abcdefgh")]
        assert client.send(ping(b"abcdefgh", ACK)) == [http2.PingAcked(b"abcdefgh")]
        assert client.send(ping(b"abcdefgh", ACK)) == []

    def test_an_ack_that_answers_nothing_is_ignored(self, client: Client) -> None:
        assert client.send(ping(b"abcdefgh", ACK)) == []
        assert client.sent() == []

    def test_ours_must_have_8_bytes(self, client: Client) -> None:
        with pytest.raises(http2.LocalProtocolError, match="8 bytes, not 3"):
            client.connection.ping(b"abc")

    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
            (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
            (frame(PING, 0, 0, bytes(9)), FRAME_SIZE_ERROR),
            (frame(PING, ACK, 0), FRAME_SIZE_ERROR),
        ],
    )
    def test_wrong_ones_end_the_connection(self, client: Client, wrong: bytes, code: int) -> None:
        client.send(wrong)
        assert client.failure() == code


class TestPriority:
    """RFC 9113 5.3: the scheme is gone; frames are checked and ignored."""

    @pytest.mark.parametrize("stream_id", [1, 2, 7, 2**31 - 1])
    @pytest.mark.parametrize("dependency", [0, 1, 7, 2**31 + 7])
    def test_it_is_ignored_on_streams_in_any_state(self, client: Client, stream_id: int, dependency: int) -> None:
        assert client.send(frame(PRIORITY, 0, stream_id, dependency.to_bytes(4, "big") + b"\x10")) == []
        assert client.sent() == []
        assert client.still_serves(3)

    def test_on_the_connection_it_is_an_error(self, client: Client) -> None:
        client.send(frame(PRIORITY, 0, 0, bytes(5)))
        assert client.failure() == PROTOCOL_ERROR

    @pytest.mark.parametrize("length", [0, 4, 6])
    def test_a_wrong_length_costs_the_stream(self, client: Client, length: int) -> None:
        client.send(frame(PRIORITY, 0, 1, bytes(length)))
        assert reset_code(client.sent(), 1) == FRAME_SIZE_ERROR
        assert client.still_serves(3)

    def test_a_wrong_length_on_an_idle_stream_which_cannot_be_reset_costs_the_connection(self, client: Client) -> None:
        client.send(frame(PRIORITY, 0, 9, bytes(4)))
        assert client.failure() == FRAME_SIZE_ERROR

    def test_in_headers_it_is_skipped(self, client: Client) -> None:
        [event] = client.send(frame(HEADERS, END_HEADERS | PRIORITIZED, 3, b"\0\0\0\3\xff" + block(REQUEST)))
        assert isinstance(event, http2.RequestReceived)
        assert event.headers == REQUEST

    @pytest.mark.parametrize("length", [0, 4])
    def test_headers_too_short_for_it_end_the_connection(self, client: Client, length: int) -> None:
        client.send(frame(HEADERS, END_HEADERS | PRIORITIZED, 3, bytes(length)))
        assert client.failure() == FRAME_SIZE_ERROR


@pytest.mark.parametrize("length", [0, 3, 5, 8])
def test_a_reset_of_a_wrong_length_ends_the_connection(client: Client, length: int) -> None:
    client.send(frame(RST_STREAM, 0, 1, bytes(length)))
    assert client.failure() == FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    ("wrong", "code"),
    [(frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR), (frame(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR)],
)
def test_a_wrong_goaway_ends_the_connection(client: Client, wrong: bytes, code: int) -> None:
    client.send(wrong)
    assert client.failure() == code


def test_a_goaways_last_stream_is_told_without_its_reserved_bit(client: Client) -> None:
    assert client.send(goaway(2**31 | 5)) == [http2.GoAwayReceived(5, 0, b"")]


@pytest.mark.parametrize("kind", [0x0A, 0x0C, 0x10, 0xFF])
@pytest.mark.parametrize("stream_id", [0, 1, 2, 99])
def test_frames_of_unknown_types_are_ignored(client: Client, kind: int, stream_id: int) -> None:
    assert client.send(frame(kind, 0xFF, stream_id, b"\xff" * 100)) == []
    assert client.sent() == []
    assert client.still_serves(3)


def test_unknown_flags_are_ignored(client: Client) -> None:
    events = client.send(headers(3, flags=END_HEADERS | 0xC2), data(3, b"x", END_STREAM | 0xF6), ping(bytes(8), 0xFE))
    assert [type(event) for event in events] == [http2.RequestReceived, http2.DataReceived]


class TestPadding:
    """RFC 9113 6.1 and 6.2."""

    @pytest.mark.parametrize("padding", [0, 1, 255])
    def test_it_is_removed_from_data(self, client: Client, padding: int) -> None:
        payload = padded(b"abc", padding)
        assert client.send(data(1, payload, PADDED)) == [http2.DataReceived(1, b"abc", len(payload), False)]

    def test_it_is_removed_from_headers_with_and_without_priority(self, client: Client) -> None:
        first = frame(HEADERS, END_HEADERS | PADDED, 3, padded(block(REQUEST), 7))
        second = frame(HEADERS, END_HEADERS | PADDED | PRIORITIZED, 5, padded(bytes(5) + block(REQUEST), 7))
        for event in client.send(first, second):
            assert isinstance(event, http2.RequestReceived)
            assert event.headers == REQUEST

    def test_data_may_be_padding_only(self, client: Client) -> None:
        assert client.send(data(1, padded(b"", 9), PADDED)) == [http2.DataReceived(1, b"", 10, False)]

    @pytest.mark.parametrize("kind", ["DATA", "HEADERS"])
    def test_as_long_as_its_frame_or_longer_it_ends_the_connection(self, client: Client, kind: str) -> None:
        payload = b"\x04abc"
        client.send(data(1, payload, PADDED) if kind == "DATA" else frame(HEADERS, END_HEADERS | PADDED, 3, payload))
        assert client.failure() == PROTOCOL_ERROR

    @pytest.mark.parametrize("kind", ["DATA", "HEADERS"])
    def test_a_padded_frame_without_a_pad_length_ends_the_connection(self, client: Client, kind: str) -> None:
        client.send(data(1, b"", PADDED) if kind == "DATA" else frame(HEADERS, END_HEADERS | PADDED, 3))
        assert client.failure() == FRAME_SIZE_ERROR

    def test_padding_that_leaves_no_room_for_priority_ends_the_connection(self, client: Client) -> None:
        client.send(frame(HEADERS, END_HEADERS | PADDED | PRIORITIZED, 3, padded(bytes(4), 3)))
        assert client.failure() == FRAME_SIZE_ERROR

    def test_on_a_closed_stream_it_is_checked_too(self, client: Client) -> None:
        client.connection.reset_stream(1, 0)
        client.sent()
        client.send(data(1, b"\xffabc", PADDED))
        assert client.failure() == PROTOCOL_ERROR


class TestContinuation:
    """RFC 9113 6.10."""

    def test_a_header_block_may_come_in_pieces_of_any_size(self, client: Client) -> None:
        whole = block(REQUEST)
        pieces = [whole[:1], b"", whole[1:40], whole[40:]]
        frames = [frame(HEADERS, END_STREAM, 3, pieces[0])]
        frames += [frame(CONTINUATION, 0, 3, piece) for piece in pieces[1:-1]]
        assert client.send(*frames) == []
        assert client.send(frame(CONTINUATION, END_HEADERS, 3, pieces[-1])) == [http2.RequestReceived(3, REQUEST, True)]

    def test_what_follows_the_last_piece_is_as_if_there_had_been_one(self, client: Client) -> None:
        filler = [*REQUEST, (b"x", b"y" * 6_000)]
        whole = block(filler)
        for stream_id in (3, 5, 7, 9):
            [event] = client.send(
                frame(HEADERS, 0, stream_id, whole[:3_000]),
                frame(CONTINUATION, 0, stream_id, whole[3_000:6_000]),
                frame(CONTINUATION, END_HEADERS, stream_id, whole[6_000:]),
            )
            assert event == http2.RequestReceived(stream_id, filler, False)
            assert client.send(data(stream_id, b"x")) == [http2.DataReceived(stream_id, b"x", 1, False)]
        [event] = client.send(frame(HEADERS, 0, 11, whole[:1]), frame(CONTINUATION, END_HEADERS, 11, whole[1:]))
        assert event == http2.RequestReceived(11, filler, False)
        assert client.still_serves(13)

    def test_trailers_may_come_in_pieces(self, client: Client) -> None:
        whole = block([(b"a", b"b")])
        frames = frame(HEADERS, END_STREAM, 1, whole[:2]), frame(CONTINUATION, END_HEADERS, 1, whole[2:])
        assert client.send(*frames) == [http2.TrailersReceived(1, [(b"a", b"b")])]

    @pytest.mark.parametrize(
        "other",
        [data(1, b"x"), ping(), frame(CONTINUATION, END_HEADERS, 1), headers(5), frame(0x99), settings()],
        ids=["DATA", "PING", "CONTINUATION of another", "HEADERS", "unknown", "SETTINGS"],
    )
    def test_nothing_else_may_come_between_the_pieces(self, client: Client, other: bytes) -> None:
        client.send(headers(3, flags=0), other)
        assert client.failure() == PROTOCOL_ERROR

    @pytest.mark.parametrize("before", [b"", headers(3)], ids=["nothing", "a whole block"])
    @pytest.mark.parametrize("flags", [0, END_HEADERS])
    def test_it_must_continue_something(self, client: Client, before: bytes, flags: int) -> None:
        client.send(before, frame(CONTINUATION, flags, 3, block(REQUEST)))
        assert client.failure() == PROTOCOL_ERROR
