"""The half of a connection that sends: calls in, bytes out.

Rules:
- Nothing is sent on a stream before its response headers or after its end, and no DATA beyond the stream's and the connection's
  window (RFC 9113 5.2), which the peer may make negative; an empty DATA frame needs no window (RFC 9113 6.9.1).
- A call that breaks a rule raises LocalProtocolError and sends nothing; StreamClosed if the stream is gone, which can be no fault
  of the caller.
- A response that ends before its request asks the peer to stop with RST_STREAM(NO_ERROR) (RFC 9113 8.1): no stream outlives its
  response.
"""

from __future__ import annotations

from trio_frontend.rpc.http2 import frames
from trio_frontend.rpc.http2.budgets import PingPolicy
from trio_frontend.rpc.http2.errors import ErrorCode, LocalProtocolError, StreamClosed
from trio_frontend.rpc.http2.frames import STREAM_ID_MASK
from trio_frontend.rpc.http2.limits import DEFAULT_WINDOW, Limits
from trio_frontend.rpc.http2.streams import Stream, Streams

# Every peer takes frames of this size (RFC 9113 4.2), and larger ones are not worth having: others' frames wait behind them.
_MAX_SENT_FRAME_SIZE = 16_384

_MAX_DEBUG = 1_024

_pack_header = frames.pack_header


class Outgoing:
    """Output, send windows, and what is given back of the receive windows. See `Connection`."""

    __slots__ = (
        "_credit",
        "_credit_due",
        "_failed",
        "_frames_sent",
        "_last_accepted",
        "_live",
        "_max_unsent",
        "_pings",
        "_pings_unanswered",
        "_receive_window",
        "_send_window",
        "_stream_credit_due",
        "_streams",
        "_table_update",
        "limits",
        "out",
    )

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.out = bytearray()
        self._streams = Streams()
        self._live = self._streams.live
        self._max_unsent = limits.max_unsent
        self._send_window = DEFAULT_WINDOW
        self._frames_sent = 0  # on streams, since they were last counted for the peer's WINDOW_UPDATEs
        self._pings = PingPolicy(limits)
        self._pings_unanswered = 0
        self._receive_window = limits.connection_window
        self._credit = 0
        self._credit_due = limits.connection_window // 2
        self._stream_credit_due = limits.stream_window // 2
        self._last_accepted = STREAM_ID_MASK  # the lowest last-stream-id that our GOAWAYs named
        self._table_update = b""  # what the next header block must begin with
        self._failed = False

    @property
    def unsent(self) -> int:
        """Bytes of output not yet taken. The caller stops reading while it is over `limits.max_unsent`."""
        return len(self.out)

    @property
    def open_streams(self) -> int:
        return len(self._live)

    def take_output(self) -> bytes:
        """The bytes to send, which are then no longer ours."""
        output = bytes(self.out)
        self.out.clear()
        return output

    def sendable(self, stream_id: int) -> int:
        """Bytes that the windows let through now; 0 or less if none, or if the stream is closed."""
        stream = self._live.get(stream_id)
        return 0 if stream is None else min(stream.send_window, self._send_window)

    def send_headers(self, stream_id: int, block: bytes, end_stream: bool = False) -> None:
        """The response's headers, or, the second time and with `end_stream`, its trailers. `block` is of `encode_headers`."""
        stream = self._live.get(stream_id)
        if stream is None:
            raise StreamClosed(f"headers on stream {stream_id}, which is not open")
        if stream.response_begun and not end_stream:
            raise LocalProtocolError(f"response headers twice on stream {stream_id}")
        if self._table_update:
            block = self._table_update + block
            self._table_update = b""
        self.out += frames.header_block(stream_id, block, end_stream, _MAX_SENT_FRAME_SIZE)
        self._frames_sent += 1
        self._pings.strikes = 0
        stream.response_begun = stream.response_open = True
        if end_stream:
            self._end_response(stream)

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """At most `sendable(stream_id)` bytes, in DATA frames of up to 16,384 bytes."""
        stream = self._live.get(stream_id)
        if stream is None:
            raise StreamClosed(f"data on stream {stream_id}, which is not open")
        if not stream.response_open:
            raise LocalProtocolError(f"data before headers on stream {stream_id}")
        length = len(data)
        if length and length > min(stream.send_window, self._send_window):
            raise LocalProtocolError(f"{length} bytes on stream {stream_id}, whose window is {self.sendable(stream_id)}")
        stream.send_window -= length
        self._send_window -= length
        self._pings.strikes = 0
        position = 0
        while length - position > _MAX_SENT_FRAME_SIZE:
            self._append_data(stream_id, data[position : position + _MAX_SENT_FRAME_SIZE], 0)
            position += _MAX_SENT_FRAME_SIZE
        if length or end_stream:
            self._append_data(stream_id, data[position:], frames.END_STREAM if end_stream else 0)
        if end_stream:
            self._end_response(stream)

    def try_send_message(self, stream_id: int, prefix: bytes, data: bytes) -> bool:
        """The fast path: prefix and data in one DATA frame, if windows, frame size and `max_unsent` allow; otherwise nothing.

        It equals `send_data(stream_id, prefix + data)` where it returns True, and never raises.
        """
        stream = self._live.get(stream_id)
        length = len(prefix) + len(data)
        out = self.out
        if (
            stream is None
            or length > stream.send_window
            or length > self._send_window
            or length > _MAX_SENT_FRAME_SIZE
            or not stream.response_open
            or len(out) > self._max_unsent
        ):
            return False
        stream.send_window -= length
        self._send_window -= length
        self._frames_sent += 1
        self._pings.strikes = 0
        out += _pack_header(length << 8, 0, stream_id)
        out += prefix
        out += data
        return True

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        """End a stream with RST_STREAM. A stream that is closed already stays so."""
        stream = self._live.get(stream_id)
        if stream is not None:
            self._reset(stream_id, error_code)
            self._forget(stream)

    def acknowledge(self, stream_id: int, n: int) -> None:
        """The application has consumed n flow-controlled bytes of a stream; they are given back to the peer in batches.

        What a stream leaves unacknowledged is given back when it closes, so for a closed stream there is nothing to do.
        """
        stream = self._live.get(stream_id)
        if stream is None:
            return
        if not 0 <= n <= stream.unacknowledged:
            raise LocalProtocolError(f"{n} bytes acknowledged on stream {stream_id} of {stream.unacknowledged}")
        stream.unacknowledged -= n
        if stream.remote_open:
            stream.credit += n
            if stream.credit >= self._stream_credit_due:
                self.out += frames.window_update(stream_id, stream.credit)
                stream.receive_window += stream.credit
                stream.credit = 0
        self._give_back(n)

    def ping(self, payload8: bytes) -> None:
        """A PING with 8 bytes of the caller's; PingAcked will have them."""
        if len(payload8) != 8:
            raise LocalProtocolError(f"a PING's payload is 8 bytes, not {len(payload8)}")
        if not self._failed:
            self._pings_unanswered += 1
            self.out += frames.ping(payload8, 0)

    def go_away(self, error_code: int, last_stream_id: int | None = None, debug: bytes = b"") -> None:
        """Say that streams above `last_stream_id` are not served; those that are open go on (RFC 9113 6.8).

        None means the highest stream seen. For a graceful end, first 2^31-1, and None a round trip later. On a connection that
        failed, which has said so, this does nothing.
        """
        if self._failed:
            return
        if last_stream_id is None:
            last_stream_id = self._streams.highest
        self._last_accepted = min(self._last_accepted, last_stream_id)
        self.out += frames.goaway(self._last_accepted, error_code, debug[:_MAX_DEBUG])

    def _append_data(self, stream_id: int, data: bytes, flags: int) -> None:
        self._frames_sent += 1
        self.out += _pack_header(len(data) << 8, flags, stream_id)
        self.out += data

    def _end_response(self, stream: Stream) -> None:
        if stream.remote_open:
            self._reset(stream.id, ErrorCode.NO_ERROR)
        self._forget(stream)

    def _reset(self, stream_id: int, error_code: int) -> None:
        self.out += frames.rst_stream(stream_id, error_code)
        self._streams.remember_reset(stream_id)

    def _forget(self, stream: Stream) -> None:
        del self._live[stream.id]
        self._give_back(stream.unacknowledged)

    def _give_back(self, n: int) -> None:
        self._credit += n
        if self._credit >= self._credit_due:
            self.out += frames.window_update(0, self._credit)
            self._receive_window += self._credit
            self._credit = 0
