"""Protects the client's connection without I/O: whatever a server sends is an event of its call, or one error."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import pytest

from trio_frontend.client.connection import (
    Connection,
    ConnectionBrokenError,
    DataReceived,
    ErrorCodes,
    GoAwayReceived,
    ResponseEnded,
    ResponseStarted,
    StreamReset,
)
from trio_frontend.client.errors import StatusCode

OK = [(":status", "200"), ("content-type", "application/grpc+proto")]


class Peer:
    """A client connection and, by h2, the server's side of it."""

    def __init__(self) -> None:
        self.client = Connection("test")
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.server.initiate_connection()
        self.exchange()

    def exchange(self) -> tuple[list[object], list[object]]:
        """Carry all that waits, both ways; what each side (client, server) learnt from it."""
        learnt: tuple[list[object], list[object]] = ([], [])
        while True:
            there, back = bytes(self.client.out), self.server.data_to_send()
            self.client.out.clear()
            if not there and not back:
                return learnt
            learnt[1].extend(self.server.receive_data(there))
            learnt[0].extend(self.client.receive(back))

    def open(self, timeout: float = float("inf")) -> int:
        stream_id = self.client.open_stream("http", "host:1", "a.Service", "Method", timeout, [("x", "y")])
        self.client.send(stream_id, b"", end_stream=True)
        return stream_id


@pytest.fixture
def peer() -> Peer:
    return Peer()


def request_headers(peer: Peer, timeout: float) -> dict[str, str]:
    peer.open(timeout)
    (event,) = [event for event in peer.exchange()[1] if isinstance(event, h2.events.RequestReceived)]
    return dict(event.headers)


def test_a_request_has_the_headers_that_grpc_asks_for(peer: Peer) -> None:
    headers = request_headers(peer, float("inf"))
    assert headers == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/a.Service/Method",
        ":authority": "host:1",
        "te": "trailers",
        "content-type": "application/grpc+proto",
        "user-agent": "test",
        "x": "y",
    }


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (1.5, "1500000u"),
        (0.0000001, "1u"),
        (-1.0, "1u"),
        (0.25, "250000u"),
        (99.0, "99S"),
        (99.5, "100S"),
        (3600.0, "3600S"),
        (1e12, "99999999S"),
    ],
)
def test_a_timeout_has_at_most_eight_digits_and_is_never_shorter_than_asked(peer: Peer, seconds: float, header: str) -> None:
    assert request_headers(peer, seconds)["grpc-timeout"] == header
    assert len(header) <= 9


def test_a_response_is_its_metadata_its_data_and_its_status(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, [*OK, ("a", "b"), ("c-bin", "AAE"), ("c-bin", "!!")])
    peer.server.send_data(stream_id, b"data")
    peer.server.send_headers(stream_id, [("grpc-status", "5"), ("grpc-message", "not%20here"), ("t", "u")], end_stream=True)
    started, data, ended, *_ = peer.exchange()[0]
    assert started == ResponseStarted(stream_id, [("a", "b"), ("c-bin", b"\x00\x01")])
    assert data == DataReceived(stream_id, b"data", 4)
    assert isinstance(ended, ResponseEnded)
    assert (ended.status.status_code, ended.status.status_message) == (StatusCode.NOT_FOUND, "not here")
    assert ended.metadata == [("t", "u")]


@pytest.mark.parametrize(
    ("headers", "code", "said"),
    [
        ([(":status", "503")], StatusCode.UNAVAILABLE, "HTTP status 503"),
        ([(":status", "404"), ("content-type", "text/html")], StatusCode.UNIMPLEMENTED, "HTTP status 404"),
        ([(":status", "401")], StatusCode.UNAUTHENTICATED, "HTTP status 401"),
        ([(":status", "418")], StatusCode.UNKNOWN, "HTTP status 418"),
        ([(":status", "200"), ("content-type", "text/html")], StatusCode.UNKNOWN, "content-type 'text/html'"),
        ([(":status", "200")], StatusCode.UNKNOWN, "content-type ''"),
        ([*OK, ("grpc-encoding", "gzip")], StatusCode.INTERNAL, "grpc-encoding 'gzip'"),
    ],
)
def test_a_response_that_is_not_grpc_fails_its_call_alone(
    peer: Peer, headers: list[tuple[str, str]], code: StatusCode, said: str
) -> None:
    stream_id, other = peer.open(), peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, headers)
    peer.server.send_headers(other, OK)
    first, second = peer.exchange()[0]
    assert isinstance(first, ResponseEnded)
    assert first.status.status_code is code
    assert said in first.status.status_message
    assert second == ResponseStarted(other, [])


@pytest.mark.parametrize("trailers", [[("x", "y")], [("grpc-status", "")], [("grpc-status", "-1")], [("grpc-status", "OK")]])
def test_trailers_without_a_status_are_unknown(peer: Peer, trailers: list[tuple[str, str]]) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, [*OK, *trailers], end_stream=True)
    ended = peer.exchange()[0][0]
    assert isinstance(ended, ResponseEnded)
    assert ended.status.status_code is StatusCode.UNKNOWN


def test_a_stream_that_ends_without_trailers_is_internal(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, OK)
    peer.server.send_data(stream_id, b"", end_stream=True)
    ended = peer.exchange()[0][-1]
    assert isinstance(ended, ResponseEnded)
    assert ended.status.status_code is StatusCode.INTERNAL


def test_a_reset_is_an_event_of_its_stream(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
    assert peer.exchange()[0] == [StreamReset(stream_id, ErrorCodes.REFUSED_STREAM)]


def test_streams_go_on_after_a_goaway_in_the_same_bytes(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, OK)
    goaway = bytes.fromhex("000008 07 00 00000000 00000001 00000000".replace(" ", ""))
    before = peer.server.data_to_send()
    peer.server.send_data(stream_id, b"still")
    peer.server.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
    events = peer.client.receive(before + goaway + peer.server.data_to_send())
    kinds = [type(event) for event in events]
    assert kinds[:4] == [ResponseStarted, GoAwayReceived, DataReceived, ResponseEnded]
    assert events[1] == GoAwayReceived(stream_id, 0, b"")


def test_the_window_of_a_stream_opens_only_as_its_data_is_consumed(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, OK)
    window = 1 << 20
    sent = 0
    while room := min(peer.server.local_flow_control_window(stream_id), 16_384):
        peer.server.send_data(stream_id, b"x" * room)
        sent += room
        peer.exchange()
    assert sent == window
    peer.client.acknowledge(stream_id, 1000)
    peer.exchange()
    assert peer.server.local_flow_control_window(stream_id) == 1000


def test_one_stream_that_nobody_reads_does_not_close_the_connections_window(peer: Peer) -> None:
    for _ in range(30):
        stream_id = peer.open()
        peer.exchange()
        peer.server.send_headers(stream_id, OK)
        while room := min(peer.server.local_flow_control_window(stream_id), 16_384):
            peer.server.send_data(stream_id, b"x" * room)
            peer.exchange()
    other = peer.open()
    peer.exchange()
    assert peer.server.local_flow_control_window(other) > 0


@pytest.mark.parametrize(
    "garbage",
    [
        bytes.fromhex("000001010500000001ff"),  # HEADERS whose block is no HPACK
        bytes.fromhex("000000080000000000"),  # WINDOW_UPDATE without a number
        bytes.fromhex("000004080000000000ffffffff"),  # the window beyond 2^31-1
        bytes.fromhex("000000000000000000"),  # DATA on stream 0
        bytes.fromhex("00000401040000000200828684"),  # HEADERS on a stream that we did not open
    ],
)
def test_what_means_nothing_is_one_kind_of_error(peer: Peer, garbage: bytes) -> None:
    peer.open()
    peer.exchange()
    with pytest.raises(ConnectionBrokenError):
        peer.client.receive(garbage)


def test_resetting_a_stream_that_is_over_does_nothing(peer: Peer) -> None:
    stream_id = peer.open()
    peer.exchange()
    peer.server.send_headers(stream_id, [*OK, ("grpc-status", "0")], end_stream=True)
    peer.exchange()
    peer.client.reset(stream_id, ErrorCodes.CANCEL)
    peer.client.acknowledge(stream_id, 10)
    assert bytes(peer.client.out) == b""


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00\x00\x00\x00"])
@pytest.mark.parametrize("size", [1, 100])
def test_a_server_of_another_protocol_is_seen_at_its_first_bytes(beginning: bytes, size: int) -> None:
    client = Connection("test")

    def receive() -> None:
        for start in range(0, len(beginning), size):
            client.receive(beginning[start : start + size])

    with pytest.raises(ConnectionBrokenError, match="does not speak HTTP/2"):
        receive()
