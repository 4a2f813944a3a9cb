"""The frames that carry no part of a request: SETTINGS, WINDOW_UPDATE, PING, RST_STREAM, PRIORITY, GOAWAY, unknown ones.

Rules:
- Each has a fixed shape, checked first; a wrong one is the connection's end (RFC 9113 4.2, 5.4.1).
- Each costs a budget (limits.py), since flow control holds none of them back.
- Nothing the peer says is kept, but for its window: unknown settings and frame types are forgotten at once.
"""

from __future__ import annotations

from trio_frontend.rpc.http2 import frames
from trio_frontend.rpc.http2.budgets import Budget
from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError, StreamError
from trio_frontend.rpc.http2.events import Event, GoAwayReceived, PingAcked, StreamReset, WindowUpdated
from trio_frontend.rpc.http2.frames import STREAM_ID_MASK
from trio_frontend.rpc.http2.header_blocks import NO_TABLE
from trio_frontend.rpc.http2.limits import (
    DEFAULT_TABLE_SIZE,
    DEFAULT_WINDOW,
    MAX_MAX_FRAME_SIZE,
    MAX_WINDOW,
    MIN_MAX_FRAME_SIZE,
    Limits,
)
from trio_frontend.rpc.http2.outgoing import Outgoing

# A gRPC client may send three for a unary call's one DATA frame: one per stream and two for the connection.
_WINDOW_UPDATES_PER_FRAME = 4


class Control(Outgoing):
    """What the peer's control frames change. See `Connection`."""

    __slots__ = (
        "_first_settings_due",
        "_ignored",
        "_peer_initial_window",
        "_resets",
        "_settings",
        "_settings_unanswered",
        "_table_dropped",
        "_window_updates",
    )

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._first_settings_due = True
        self._settings_unanswered = 1
        self._peer_initial_window = DEFAULT_WINDOW
        self._table_dropped = False  # our encoder has said that its table, which it never uses, is empty
        self._settings = Budget("SETTINGS frames", limits.settings)
        self._window_updates = Budget("WINDOW_UPDATE frames", limits.window_updates)
        self._resets = Budget("streams reset or refused", limits.resets)
        self._ignored = Budget("frames without effect", limits.ignored)
        self.out += frames.settings(
            {
                frames.SETTINGS_MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                frames.SETTINGS_INITIAL_WINDOW_SIZE: limits.stream_window,
                frames.SETTINGS_MAX_FRAME_SIZE: limits.max_frame_size,
                frames.SETTINGS_MAX_HEADER_LIST_SIZE: limits.max_header_list_size,
            }
        )
        if limits.connection_window > DEFAULT_WINDOW:
            self.out += frames.window_update(0, limits.connection_window - DEFAULT_WINDOW)

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, payload, now, events)
        elif kind == frames.PING:
            self._ping(flags, stream_id, payload, now, events)
        elif kind == frames.SETTINGS:
            self._peer_settings(flags, stream_id, payload, now, events)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, payload, now, events)
        elif kind == frames.PRIORITY:
            self._priority(stream_id, payload, now)
        elif kind == frames.GOAWAY:
            self._goaway(stream_id, payload, now, events)
        elif kind == frames.PUSH_PROMISE:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            # RFC 9113 4.1: unknown types are ignored.
            self._ignored.spend(now)

    def _window_update(self, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong length")
        if self._frames_sent:
            self._window_updates.earn(_WINDOW_UPDATES_PER_FRAME * self._frames_sent)
            self._frames_sent = 0
        self._window_updates.spend(now)
        increment = frames.unpack_word(payload)[0] & MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            window = self._send_window
            self._send_window = window + increment
            if self._send_window > MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "connection window above 2^31-1")
            if window <= 0:
                events.append(WindowUpdated(0))
            return
        stream = self._live.get(stream_id)
        if stream is None:
            if self._streams.is_idle(stream_id):
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
            return
        if not increment:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        window = stream.send_window
        stream.send_window = window + increment
        if stream.send_window > MAX_WINDOW:
            raise StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
        if window <= 0 < stream.send_window:
            events.append(WindowUpdated(stream_id))

    def _ping(self, flags: int, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong length")
        if not flags & frames.ACK:
            self._pings.received(now)
            self.out += frames.ping(payload, frames.ACK)
        elif self._pings_unanswered:
            self._pings_unanswered -= 1
            events.append(PingAcked(payload))
        else:
            self._ignored.spend(now)

    def _peer_settings(self, flags: int, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ack with a payload")
            if self._settings_unanswered:
                self._settings_unanswered -= 1
            else:
                self._ignored.spend(now)
            return
        if len(payload) % 6:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        self._settings.spend(now)
        self._first_settings_due = False
        initial_window = self._peer_initial_window
        for key, value in frames.unpack_settings(payload):
            # What is not here is advice, or about what we do not do (RFC 9113 6.5.2).
            if key == frames.SETTINGS_INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE above 2^31-1")
                initial_window = value
            elif key == frames.SETTINGS_MAX_FRAME_SIZE and not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            elif key == frames.SETTINGS_HEADER_TABLE_SIZE and value < DEFAULT_TABLE_SIZE and not self._table_dropped:
                self._table_dropped = True
                self._table_update = NO_TABLE
            elif key == frames.SETTINGS_ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH neither 0 nor 1")
        self._change_initial_window(initial_window, events)
        self.out += frames.SETTINGS_ACK

    def _change_initial_window(self, initial_window: int, events: list[Event]) -> None:
        """RFC 9113 6.9.2: the difference applies to every stream, and may make a window negative."""
        difference = initial_window - self._peer_initial_window
        if not difference:
            return
        self._peer_initial_window = initial_window
        for stream in self._live.values():
            window = stream.send_window
            stream.send_window = window + difference
            if stream.send_window > MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE takes a window above 2^31-1")
            if window <= 0 < stream.send_window:
                events.append(WindowUpdated(stream.id))

    def _rst_stream(self, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if len(payload) != 4:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong length")
        stream = self._live.get(stream_id)
        if stream is None:
            if self._streams.is_idle(stream_id):
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
            self._ignored.spend(now)
            return
        self._forget(stream)
        events.append(StreamReset(stream_id, frames.unpack_word(payload)[0], True))
        self._resets.spend(now)

    def _priority(self, stream_id: int, payload: bytes, now: float) -> None:
        """RFC 9113 5.3.2: ignored, whatever the stream's state, but checked."""
        if not stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on the connection")
        if len(payload) != 5:
            if self._streams.is_idle(stream_id):
                # An idle stream cannot be reset.
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong length")
            raise StreamError(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong length")
        self._ignored.spend(now)

    def _goaway(self, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong length")
        self._ignored.spend(now)
        last_stream_id, error_code = frames.unpack_two_words(payload)
        events.append(GoAwayReceived(last_stream_id & STREAM_ID_MASK, error_code, payload[8:]))
