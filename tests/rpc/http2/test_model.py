"""Protects flow control and stream states between two sides that keep the rules: a model client against the connection.

The model keeps the windows of both directions on its own, from what it sees on the wire (RFC 9113 5.2, 6.9).
"""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.rpc.http2.wire import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PREFACE,
    RESPONSE,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    WINDOW_UPDATE,
    data,
    headers,
    padded,
    read_frames,
    rst_stream,
    settings,
    window_update,
)
from trio_frontend.rpc import http2

LIMITS = http2.Limits(stream_window=70_000, connection_window=100_000, max_concurrent_streams=8)


class TwoSides(RuleBasedStateMachine):
    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.connection = http2.Connection(LIMITS)
        self.now = 0.0
        self.next_stream = 1
        # The client's view of what it may send.
        self.client_connection_window = 65_535
        self.client_window: dict[int, int] = {}
        self.client_open: dict[int, bool] = {}  # live streams: whether the request is unfinished
        # The client's view of what it may be sent.
        self.initial_window = 65_535
        self.granted_connection = 65_535
        self.granted: dict[int, int] = {}
        # The application's view.
        self.unread: dict[int, int] = {}
        self.begun: set[int] = set()
        self.send(PREFACE, settings())

    def send(self, *frames: bytes) -> None:
        self.now += 1.0
        for event in self.connection.receive_data(b"".join(frames), self.now):
            assert not isinstance(event, http2.ConnectionFailed), event
            if isinstance(event, http2.DataReceived):
                self.unread[event.stream_id] += event.flow_controlled_length
            elif isinstance(event, http2.StreamReset):
                assert event.by_peer

    @invariant()
    def what_was_sent_keeps_the_rules(self) -> None:
        for frame in read_frames(self.connection.take_output()):
            if frame.kind == DATA:
                self.granted_connection -= len(frame.payload)
                self.granted[frame.stream_id] -= len(frame.payload)
                assert not frame.payload or (self.granted_connection >= 0 and self.granted[frame.stream_id] >= 0)
            elif frame.kind == WINDOW_UPDATE:
                increment = int.from_bytes(frame.payload, "big")
                if frame.stream_id:
                    assert self.client_open[frame.stream_id], "a window for a request that has ended"
                    self.client_window[frame.stream_id] += increment
                else:
                    self.client_connection_window += increment
            else:
                assert frame.kind in (HEADERS, RST_STREAM, SETTINGS)
            assert frame.kind != GOAWAY
        assert self.client_connection_window <= LIMITS.connection_window
        assert all(window <= LIMITS.stream_window for window in self.client_window.values())
        assert self.connection.open_streams == len(self.client_open)
        for stream_id in self.client_open:
            assert self.connection.sendable(stream_id) == min(self.granted[stream_id], self.granted_connection)

    def forget(self, stream_id: int) -> None:
        del self.client_open[stream_id]
        self.unread.pop(stream_id)
        self.begun.discard(stream_id)

    @rule(target=streams, begin=st.booleans())
    def open(self, begin: bool) -> int:
        stream_id = self.next_stream
        if len(self.client_open) < LIMITS.max_concurrent_streams:
            self.next_stream += 2
            self.client_open[stream_id] = True
            self.client_window[stream_id] = LIMITS.stream_window
            self.granted[stream_id] = self.initial_window
            self.unread[stream_id] = 0
            self.send(headers(stream_id))
            if begin:
                self.connection.send_headers(stream_id, RESPONSE)
                self.begun.add(stream_id)
        return stream_id

    @rule(stream_id=streams, size=st.integers(0, 16_384), padding=st.integers(0, 255), end=st.booleans())
    def client_sends(self, stream_id: int, size: int, padding: int, end: bool) -> None:
        if not self.client_open.get(stream_id):
            return
        size = min(size, 16_384 - padding - 1, self.client_window[stream_id], self.client_connection_window)
        fits = size + padding + 1 <= min(self.client_window[stream_id], self.client_connection_window)
        payload, flags = (padded(b"x" * size, padding), PADDED) if padding and fits else (b"x" * size, 0)
        self.client_window[stream_id] -= len(payload)
        self.client_connection_window -= len(payload)
        if end:
            self.client_open[stream_id] = False
        self.send(data(stream_id, payload, flags | (END_STREAM if end else 0)))

    @rule(stream_id=streams)
    def client_sends_trailers(self, stream_id: int) -> None:
        if self.client_open.get(stream_id):
            self.client_open[stream_id] = False
            self.send(headers(stream_id, [(b"a", b"b")], END_HEADERS | END_STREAM))

    @rule(stream_id=consumes(streams))
    def client_cancels(self, stream_id: int) -> None:
        if stream_id in self.client_open:
            self.send(rst_stream(stream_id))
            self.forget(stream_id)

    @rule(stream_id=streams, increment=st.integers(1, 100_000), connection_increment=st.integers(1, 100_000))
    def client_grants(self, stream_id: int, increment: int, connection_increment: int) -> None:
        self.granted_connection += connection_increment
        self.send(window_update(0, connection_increment))
        if stream_id in self.client_open:
            self.granted[stream_id] += increment
            self.send(window_update(stream_id, increment))

    @rule(window=st.one_of(st.integers(0, 100_000), st.just(0)))
    def client_changes_its_initial_window(self, window: int) -> None:
        for stream_id in self.granted:
            self.granted[stream_id] += window - self.initial_window
        self.initial_window = window
        self.send(settings([(INITIAL_WINDOW_SIZE, window)]))

    @rule(stream_id=streams, size=st.integers(0, 50_000))
    def server_sends(self, stream_id: int, size: int) -> None:
        if stream_id in self.begun:
            sendable = self.connection.sendable(stream_id)
            assert sendable == min(self.granted[stream_id], self.granted_connection)
            self.connection.send_data(stream_id, b"x" * max(0, min(size, sendable)))

    @rule(stream_id=streams, size=st.integers(0, 20_000))
    def server_tries_a_message(self, stream_id: int, size: int) -> None:
        fits = size + 5 <= min(self.granted.get(stream_id, -1), self.granted_connection, 16_384)
        sent = self.connection.try_send_message(stream_id, b"\0\0\0\0\0", b"x" * size)
        assert sent is (stream_id in self.begun and fits)

    @rule(stream_id=streams, share=st.floats(0, 1))
    def server_reads(self, stream_id: int, share: float) -> None:
        n = int(self.unread.get(stream_id, 0) * share)
        if n:
            self.unread[stream_id] -= n
        self.connection.acknowledge(stream_id, n)

    @rule(stream_id=consumes(streams), reset=st.booleans())
    def server_ends(self, stream_id: int, reset: bool) -> None:
        if stream_id in self.client_open:
            if reset:
                self.connection.reset_stream(stream_id, CANCEL)
            else:
                self.connection.send_headers(stream_id, TRAILERS, end_stream=True)
            self.forget(stream_id)

    def teardown(self) -> None:
        """What is read comes back: no window is lost, whatever happened."""
        for stream_id, n in self.unread.items():
            self.connection.acknowledge(stream_id, n)
            self.unread[stream_id] = 0
        self.what_was_sent_keeps_the_rules()
        assert self.client_connection_window > LIMITS.connection_window // 2
        for stream_id, unfinished in self.client_open.items():
            if unfinished:
                assert self.client_window[stream_id] > LIMITS.stream_window // 2


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
