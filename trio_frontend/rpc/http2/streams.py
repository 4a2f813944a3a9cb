"""Streams and their states (RFC 9113 5.1), seen from a server that never pushes.

Rules:
- A stream that is open in any direction is in `Streams.live`; what is not there is idle (an odd id above the highest seen) or closed.
- Closed streams are remembered as one number, the highest id seen. Only the last few that we reset are known by name, since what
  the peer sent before our RST_STREAM reached it must be ignored (RFC 9113 5.1, closed).
"""

from __future__ import annotations

_RESETS_REMEMBERED = 256


class Stream:
    """One live stream. Windows are in bytes; the peer may make `send_window` negative (RFC 9113 6.9.2)."""

    __slots__ = (
        "body_left",  # bytes that content-length still announces, or -1: not announced
        "credit",  # bytes acknowledged by the application and not yet given back to the peer
        "id",
        "receive_window",
        "remote_open",  # the peer has not ended its side
        "response_begun",
        "response_open",  # response headers are sent, and the response has not ended
        "send_window",
        "unacknowledged",  # bytes delivered to the application and not yet acknowledged
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int, remote_open: bool, body_left: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.unacknowledged = 0
        self.credit = 0
        self.remote_open = remote_open
        self.response_begun = False
        self.response_open = False
        self.body_left = body_left


class Streams:
    """The live streams, and what is known of the others."""

    __slots__ = ("_reset", "highest", "live")

    def __init__(self) -> None:
        self.live: dict[int, Stream] = {}
        self.highest = 0
        self._reset: dict[int, None] = {}

    def is_idle(self, stream_id: int) -> bool:
        """Never used by the peer. Even ids are ours, and we never use one."""
        return stream_id > self.highest or not stream_id & 1

    def remember_reset(self, stream_id: int) -> None:
        self._reset[stream_id] = None
        if len(self._reset) > _RESETS_REMEMBERED:
            del self._reset[next(iter(self._reset))]

    def was_reset(self, stream_id: int) -> bool:
        return stream_id in self._reset
