"""A server's side of one HTTP/2 connection (RFC 9113), without I/O and without a clock: bytes in, events out; calls in, bytes out.

Rules:
- A frame's length is checked at its 9-byte header. At most one unfinished frame, and one unfinished header block, is held.
- A fault of the peer raises inside, never outside: it becomes RST_STREAM and StreamReset, or GOAWAY and ConnectionFailed, and the
  events before it are still delivered.
- What both sides share must stay in step: header blocks are decoded also for streams that are refused or ignored, and DATA counts
  against the connection's window, and is given back, also where no stream takes it.
- The frames of requests (DATA, HEADERS, CONTINUATION) are handled here, the others in control.py, and what is sent in outgoing.py.
"""

from __future__ import annotations

import contextlib

from trio_frontend.rpc.http2 import frames
from trio_frontend.rpc.http2.budgets import Budget
from trio_frontend.rpc.http2.control import Control
from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError, StreamError
from trio_frontend.rpc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    RequestReceived,
    StreamReset,
    TrailersReceived,
)
from trio_frontend.rpc.http2.frames import HEADER_LENGTH, PREFACE, STREAM_ID_MASK
from trio_frontend.rpc.http2.header_blocks import HeaderDecoder, ListTooLong
from trio_frontend.rpc.http2.header_fragments import HeaderFragments
from trio_frontend.rpc.http2.header_rules import Malformed, check_trailers
from trio_frontend.rpc.http2.limits import Limits
from trio_frontend.rpc.http2.streams import Stream

_DATA = frames.DATA
_HEADERS = frames.HEADERS
_unpack_header = frames.unpack_header


class Connection(Control):
    """One connection, made when its transport is open. Our SETTINGS are in the output from the start.

    The caller gives `receive_data` what it reads, acts on the events, and sends what `take_output` returns after every call of
    any method. It stops reading while `unsent` is over `limits.max_unsent`.
    """

    __slots__ = (
        "_buffer",
        "_completed",
        "_decoder",
        "_empty_data",
        "_eof",
        "_fragments",
        "_max_frame_size",
        "_needed",
        "_preface_left",
    )

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._buffer = bytearray()
        self._needed = 0  # bytes that the buffer must hold before the next step is possible
        self._preface_left = PREFACE
        self._eof = False
        self._completed = False
        self._max_frame_size = limits.max_frame_size
        self._decoder = HeaderDecoder(limits)
        self._fragments = HeaderFragments(limits)
        self._empty_data = Budget("empty DATA frames", limits.empty_data)

    # --- bytes in ---

    def receive_data(self, data: bytes | bytearray | memoryview, now: float) -> list[Event]:
        """What the bytes mean. Never raises; `now` is in seconds and never goes back."""
        events: list[Event] = []
        if self._failed or self._eof:
            return events
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._needed:
                self._completed = False
                return events
            data = bytes(buffer)
            buffer.clear()
        elif type(data) is not bytes:
            data = bytes(data)
        try:
            parsed = self._parse(data, now, events)
        except ProtocolError as error:
            self._fail(error, events)
        else:
            self._completed = parsed > 0
            if parsed < len(data):
                buffer += data[parsed:]
        return events

    def receive_eof(self) -> list[Event]:
        """The peer will send no more. Streams stay as they are: whether to answer them still is the caller's to decide."""
        events: list[Event] = []
        if not self._failed and not self._eof:
            self._eof = True
            if self._buffer or self._fragments.stream_id:
                self._fail(ProtocolError(ErrorCode.PROTOCOL_ERROR, "end of input inside a frame"), events)
        return events

    @property
    def settings_received(self) -> bool:
        """Whether the peer has sent its preface and SETTINGS."""
        return not self._first_settings_due

    @property
    def unfinished(self) -> bool:
        """Whether what came so far ends inside the preface, a frame or a header block."""
        return bool(self._buffer or self._fragments.stream_id or self._preface_left)

    @property
    def progressed(self) -> bool:
        """Whether what came last completed a frame, other than one inside a header block."""
        return self._completed and not self._fragments.stream_id

    def _parse(self, data: bytes, now: float, events: list[Event]) -> int:
        """Take every complete frame; returns how many bytes that was."""
        position = 0
        if self._preface_left:
            position = self._take_preface(data)
        end = len(data)
        max_frame_size = self._max_frame_size
        fragments = self._fragments
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
            if self._first_settings_due or fragments.stream_id:
                self._check_order(kind, flags, stream_id)
            try:
                if kind == _DATA:
                    self._data(data, start, stop, flags, stream_id, now, events)
                elif kind == _HEADERS:
                    self._headers(data, start, stop, flags, stream_id, now, events)
                elif kind == frames.CONTINUATION:
                    self._continuation(flags, data[start:stop], now, events)
                else:
                    self._control(kind, flags, stream_id, data[start:stop], now, events)
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
        expected = self._fragments.stream_id
        if expected and (kind != frames.CONTINUATION or stream_id != expected):
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
        end_stream = bool(flags & frames.END_STREAM)
        if start == stop and not end_stream:
            self._empty_data.spend(now)
        if stream is None:
            self._give_back(length)
            if not self._is_ignored(stream_id):
                raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
            return
        stream.unacknowledged += length
        if not stream.remote_open:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamError(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window")
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
        self._fragments.begin(stream_id, end_stream)
        self._fragments.add(data[start:stop])

    def _continuation(self, flags: int, payload: bytes, now: float, events: list[Event]) -> None:
        fragments = self._fragments
        stream_id = fragments.stream_id
        if not stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        fragments.add(payload)
        if flags & frames.END_HEADERS:
            self._header_block(stream_id, fragments.take(), fragments.ends_stream, now, events)

    def _header_block(self, stream_id: int, block: bytes, end_stream: bool, now: float, events: list[Event]) -> None:
        stream = self._live.get(stream_id)
        try:
            if stream is not None:
                self._trailers(stream, block, end_stream, events)
            elif stream_id > self._streams.highest:
                self._request(stream_id, block, end_stream, now, events)
            else:
                self._late_headers(stream_id, block, now)
        except Malformed as error:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from None
        except ListTooLong:
            raise StreamError(stream_id, ErrorCode.ENHANCE_YOUR_CALM, "header list too long") from None

    def _request(self, stream_id: int, block: bytes, end_stream: bool, now: float, events: list[Event]) -> None:
        self._streams.highest = stream_id
        if stream_id > self._last_accepted:
            self._late_headers(stream_id, block, now)
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

    def _late_headers(self, stream_id: int, block: bytes, now: float) -> None:
        with contextlib.suppress(ListTooLong):
            self._decoder.decode(block)
        if not self._is_ignored(stream_id):
            # What END_STREAM or the peer's own RST_STREAM closed cannot be opened again (RFC 9113 5.1), nor can a lower stream, of
            # which it is not known whether it was ever opened (RFC 9113 5.1.1).
            if stream_id == self._streams.highest:
                raise ProtocolError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream id below an earlier one")
        self._ignored.spend(now)

    def _is_ignored(self, stream_id: int) -> bool:
        """What the peer may have sent before it saw our RST_STREAM (RFC 9113 5.1) or GOAWAY (RFC 9113 6.8)."""
        return stream_id > self._last_accepted or self._streams.was_reset(stream_id)

    # --- faults ---

    def _stream_failed(self, error: StreamError, now: float, events: list[Event]) -> None:
        stream = self._live.get(error.stream_id)
        self._reset(error.stream_id, error.code)
        if stream is not None:
            self._forget(stream)
            events.append(StreamReset(error.stream_id, error.code, False))
        self._resets.spend(now)

    def _fail(self, error: ProtocolError, events: list[Event]) -> None:
        self.go_away(error.code, None, error.reason.encode("ascii", "replace"))
        self._failed = True
        self._live.clear()
        self._buffer.clear()
        self._fragments.clear()
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
