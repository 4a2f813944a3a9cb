"""A server's side of one HTTP/2 connection (RFC 9113), without I/O and without a clock: bytes in, events out; calls in, bytes out.

Rules:
- Everything that decides what a received frame may follow, and what it does, is in this module; how it looks is in frames.py.
- A frame's length is checked at its 9-byte header. At most one unfinished frame, or one unfinished header block, is held.
- A fault of the peer raises inside, never outside: it becomes RST_STREAM and StreamReset, or GOAWAY and ConnectionFailed, and the
  events before it are still delivered.
- Header blocks are decoded also for streams that are refused or ignored, and DATA counts against the connection's window also
  where no stream takes it: what both sides share must stay in step.
"""

from __future__ import annotations

import contextlib

from trio_frontend.rpc.http2 import frames
from trio_frontend.rpc.http2.budgets import Budget
from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError, StreamError
from trio_frontend.rpc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoAwayReceived,
    PingAcked,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from trio_frontend.rpc.http2.frames import HEADER_LENGTH, PREFACE, STREAM_ID_MASK
from trio_frontend.rpc.http2.header_blocks import HeaderDecoder, ListTooLong
from trio_frontend.rpc.http2.header_rules import Malformed, check_trailers
from trio_frontend.rpc.http2.limits import DEFAULT_WINDOW, MAX_MAX_FRAME_SIZE, MAX_WINDOW, MIN_MAX_FRAME_SIZE, Limits
from trio_frontend.rpc.http2.outgoing import MAX_SENT_FRAME_SIZE, Outgoing
from trio_frontend.rpc.http2.streams import Stream

_unpack_header = frames.unpack_header


class Connection(Outgoing):
    """One connection. Made when its transport is open; `limits` are bounds that the peer cannot move."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._buffer = bytearray()
        self._needed = 0  # bytes that the buffer must hold before the next step is possible
        self._preface_left = PREFACE
        self._first_settings_due = True
        self._failed = False
        self._eof = False
        self._decoder = HeaderDecoder(limits)
        self._block: list[bytes] = []  # fragments of an unfinished header block
        self._block_length = 0
        self._block_stream = 0  # 0: no block is unfinished
        self._block_ends_stream = False
        self._peer_initial_window = DEFAULT_WINDOW
        self._settings_unanswered = 1
        self._resets = Budget("streams reset or refused", limits.resets)
        self._settings = Budget("SETTINGS frames", limits.settings)
        self._empty_data = Budget("empty DATA frames", limits.empty_data)
        self._window_updates = Budget("WINDOW_UPDATE frames", limits.window_updates)
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

    # --- bytes in ---

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """What the bytes mean. Never raises; `now` is in seconds and never goes back."""
        events: list[Event] = []
        if self._failed or self._eof:
            return events
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._needed:
                return events
            data = bytes(buffer)
            buffer.clear()
        try:
            parsed = self._parse(data, now, events)
        except ProtocolError as error:
            self._fail(error, events)
        else:
            if parsed < len(data):
                buffer += data[parsed:]
        return events

    def receive_eof(self) -> list[Event]:
        """The peer will send no more. Streams stay as they are: whether to answer them still is the caller's to decide."""
        events: list[Event] = []
        if not self._failed and not self._eof:
            self._eof = True
            if self._buffer or self._block_stream:
                self._fail(ProtocolError(ErrorCode.PROTOCOL_ERROR, "end of input inside a frame"), events)
        return events

    def _parse(self, data: bytes, now: float, events: list[Event]) -> int:
        """Take every complete frame; returns how many bytes that was."""
        position = 0
        if self._preface_left:
            position = self._take_preface(data)
        end = len(data)
        max_frame_size = self.limits.max_frame_size
        while end - position >= HEADER_LENGTH:
            length, flags, stream_id = _unpack_header(data, position)
            kind = length & 0xFF
            length >>= 8
            if length > max_frame_size:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "frame too long")
            start = position + HEADER_LENGTH
            stop = start + length
            if stop > end:
                self._needed = HEADER_LENGTH + length
                return position
            stream_id &= STREAM_ID_MASK
            if self._first_settings_due or self._block_stream:
                self._check_order(kind, flags, stream_id)
            try:
                if kind == frames.DATA:
                    self._data(data, start, stop, flags, stream_id, now, events)
                elif kind == frames.HEADERS:
                    self._headers(data, start, stop, flags, stream_id, now, events)
                else:
                    self._other(kind, flags, stream_id, data[start:stop], now, events)
            except StreamError as error:
                self._stream_failed(error, now, events)
            position = stop
        self._needed = HEADER_LENGTH
        return position

    def _take_preface(self, data: bytes) -> int:
        left = self._preface_left
        if not data.startswith(left) and not left.startswith(data):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "not the HTTP/2 preface")
        taken = min(len(left), len(data))
        self._preface_left = left[taken:]
        return taken

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._first_settings_due and (kind != frames.SETTINGS or flags & frames.ACK):
            # RFC 9113 3.4
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "no SETTINGS after the preface")
        if self._block_stream and (kind != frames.CONTINUATION or stream_id != self._block_stream):
            # RFC 9113 6.10
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a header block was not continued")

    # --- DATA (RFC 9113 6.1) ---

    def _data(self, data: bytes, start: int, stop: int, flags: int, stream_id: int, now: float, events: list[Event]) -> None:
        length = stop - start
        stream = self._live.get(stream_id)
        if stream is None and self._streams.is_idle(stream_id):
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that is not open")
        self._receive_window -= length
        if self._receive_window < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        if flags & frames.PADDED:
            start, stop = _without_padding(data, start, stop)
        if stream is None:
            self._give_back(length)
            self._on_closed(stream_id, now)
            return
        stream.unacknowledged += length
        if not stream.remote_open:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window")
        end_stream = bool(flags & frames.END_STREAM)
        if start == stop and not end_stream:
            self._empty_data.spend(now)
        if stream.body_left >= 0:
            stream.body_left -= stop - start
            if stream.body_left < 0 or (end_stream and stream.body_left):
                raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "a body that does not fit its content-length")
        if end_stream:
            stream.remote_open = False
        events.append(DataReceived(stream_id, data[start:stop], length, end_stream))

    # --- HEADERS and CONTINUATION (RFC 9113 6.2 and 6.10) ---

    def _headers(
        self, data: bytes, start: int, stop: int, flags: int, stream_id: int, now: float, events: list[Event]
    ) -> None:
        if not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that is not the client's")
        if flags & frames.PADDED:
            start, stop = _without_padding(data, start, stop)
        if flags & frames.PRIORITIZED:
            start += 5
            if start > stop:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
        end_stream = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            if stop - start > self.limits.max_header_block:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header block too long")
            self._header_block(stream_id, data[start:stop], end_stream, now, events)
            return
        self._block_stream = stream_id
        self._block_ends_stream = end_stream
        self._block_length = 0
        self._add_fragment(data[start:stop])

    def _continuation(self, flags: int, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if not self._block_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        if len(self._block) > self.limits.max_continuations:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._add_fragment(payload)
        if flags & frames.END_HEADERS:
            block = b"".join(self._block)
            self._block.clear()
            self._block_stream = 0
            self._header_block(stream_id, block, self._block_ends_stream, now, events)

    def _add_fragment(self, fragment: bytes) -> None:
        self._block_length += len(fragment)
        if self._block_length > self.limits.max_header_block:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header block too long")
        self._block.append(fragment)

    def _header_block(self, stream_id: int, block: bytes, end_stream: bool, now: float, events: list[Event]) -> None:
        stream = self._live.get(stream_id)
        try:
            if stream is not None:
                self._trailers(stream, block, end_stream, events)
            elif stream_id > self._streams.highest:
                self._request(stream_id, block, end_stream, events)
            else:
                self._late_headers(stream_id, block)
        except Malformed as error:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        except ListTooLong:
            raise StreamError(stream_id, ErrorCode.ENHANCE_YOUR_CALM, "header list too long") from None

    def _request(self, stream_id: int, block: bytes, end_stream: bool, events: list[Event]) -> None:
        self._streams.highest = stream_id
        if stream_id > self._last_accepted:
            # RFC 9113 6.8: ignored, but for the state that both sides share.
            self._late_headers(stream_id, block)
            return
        if len(self._live) >= self.limits.max_concurrent_streams:
            self._decoder.decode(block)
            raise StreamError(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        headers, body_left = self._decoder.decode_request(block)
        if end_stream and body_left > 0:
            raise Malformed("no body, but a content-length")
        self._live[stream_id] = Stream(
            stream_id, self._peer_initial_window, self.limits.stream_window, not end_stream, body_left
        )
        events.append(RequestReceived(stream_id, headers, end_stream))

    def _trailers(self, stream: Stream, block: bytes, end_stream: bool, events: list[Event]) -> None:
        headers = self._decoder.decode(block)
        if not stream.remote_open:
            raise StreamError(stream.id, ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM")
        if not end_stream:
            # RFC 9113 8.1
            raise Malformed("trailers that do not end the stream")
        if stream.body_left > 0:
            raise Malformed("a body shorter than its content-length")
        check_trailers(headers)
        stream.remote_open = False
        events.append(TrailersReceived(stream.id, headers))

    def _late_headers(self, stream_id: int, block: bytes) -> None:
        with contextlib.suppress(ListTooLong):
            self._decoder.decode(block)
        if stream_id <= self._last_accepted and not self._streams.was_reset(stream_id):
            # RFC 9113 5.1: what is closed by END_STREAM or by the peer's own RST_STREAM cannot be opened again.
            raise ProtocolError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")

    # --- all other frames ---

    def _other(self, kind: int, flags: int, stream_id: int, payload: bytes, now: float, events: list[Event]) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, payload, now, events)
        elif kind == frames.PING:
            self._ping(flags, stream_id, payload, now, events)
        elif kind == frames.SETTINGS:
            self._peer_settings(flags, stream_id, payload, now, events)
        elif kind == frames.RST_STREAM:
            self._rst_stream(stream_id, payload, now, events)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, stream_id, payload, now, events)
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
        self._window_updates.earn(2 * self._data_frames_sent)
        self._data_frames_sent = 0
        self._window_updates.spend(now)
        increment = frames.unpack_word(payload)[0] & MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self._send_window += increment
            if self._send_window > MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "connection window above 2^31-1")
            events.append(WindowUpdated(0))
            return
        stream = self._live.get(stream_id)
        if stream is None:
            if self._streams.is_idle(stream_id):
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
            return
        if not increment:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
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
            # The others are advice, or about what we do not do (RFC 9113 6.5.2): our encoder has no table, and we open no streams.
            if key == frames.SETTINGS_INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE above 2^31-1")
                initial_window = value
            elif key == frames.SETTINGS_MAX_FRAME_SIZE:
                if not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
                    raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
                self._frame_size = min(value, MAX_SENT_FRAME_SIZE)
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
            stream.send_window += difference
            if stream.send_window > MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE takes a window above 2^31-1")
        if difference > 0:
            events.append(WindowUpdated(0))

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

    # --- faults ---

    def _on_closed(self, stream_id: int, now: float) -> None:
        if stream_id <= self._last_accepted and not self._streams.was_reset(stream_id):
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def _stream_failed(self, error: StreamError, now: float, events: list[Event]) -> None:
        stream = self._live.get(error.stream_id)
        self._reset(error.stream_id, error.code)
        if stream is not None:
            self._forget(stream)
            events.append(StreamReset(error.stream_id, error.code, False))
        self._resets.spend(now)

    def _fail(self, error: ProtocolError, events: list[Event]) -> None:
        self._failed = True
        self.go_away(error.code, None, error.reason.encode("ascii", "replace"))
        self._live.clear()
        self._buffer.clear()
        self._block.clear()
        events.append(ConnectionFailed(error))


def _without_padding(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Where a padded payload begins and ends without its padding (RFC 9113 6.1)."""
    if start == stop:
        raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a pad length")
    padding = data[start]
    start += 1
    if padding > stop - start:
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return start, stop - padding
