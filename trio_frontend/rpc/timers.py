"""When a connection has to do something by itself: times only, no I/O and no clock (``now`` is passed in, in seconds).

Rules that hold here:

* Times only move forward, and are looked at when they come: a read costs no timer. Each time knows by itself, when it comes, whether
  it still means something.
* Keepalive: a PING after ``keepalive_time`` of silence; silence for ``keepalive_timeout`` after it is the end. Anything that the client
  sends breaks the silence, the PING's ack among it.
* Age is spread by 10 % either way (gRPC's connection management, proposal A9).
"""

from __future__ import annotations

import enum
import math
import random
from typing import Final

from trio_frontend.rpc.limits import ServerLimits

__all__ = ["Due", "Timers"]

_AGE_SPREAD: Final = 0.1


class Due(enum.Enum):
    """What has become due."""

    PREFACE = "no HTTP/2 preface in time"
    FRAME = "a frame or header block did not arrive whole in time"
    PING = "the client is silent: ask"
    SILENCE = "no answer to a keepalive PING"
    IDLE = "no call for long enough"
    AGE = "old enough"
    LAST_GOAWAY = "the client knows that it should go"
    CUT_OFF = "the calls in flight have had their time"


class Timers:
    """One connection's times, in seconds of the clock that ``now`` comes from; ``math.inf`` is never."""

    __slots__ = (
        "_age_at",
        "_asked",
        "_frame_timeout",
        "_idle_time",
        "_keepalive_at",
        "_keepalive_time",
        "_keepalive_timeout",
        "_last_read",
        "cut_off_at",
        "frame_by",
        "idle_at",
        "last_goaway_at",
        "preface_by",
    )

    def __init__(self, limits: ServerLimits, now: float) -> None:
        self._keepalive_time = limits.keepalive_time
        self._keepalive_timeout = limits.keepalive_timeout
        self._idle_time = limits.max_connection_idle
        self._frame_timeout = limits.headers_timeout
        self._age_at = now + limits.max_connection_age * random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)
        self._last_read = now
        self._asked = False
        self._keepalive_at = now + limits.keepalive_time
        self.preface_by = now + limits.preface_timeout
        self.frame_by = math.inf
        self.idle_at = now + limits.max_connection_idle
        self.last_goaway_at = math.inf
        self.cut_off_at = math.inf

    def next(self) -> float:
        """When to ask :meth:`due` again."""
        return min(
            self.preface_by,
            self.frame_by,
            self._keepalive_at,
            self.idle_at,
            self._age_at,
            self.last_goaway_at,
            self.cut_off_at,
        )

    def due(self, now: float) -> Due | None:
        """What is due at ``now``, each time once; ask until it is None."""
        if now >= self.cut_off_at:
            self.cut_off_at = math.inf
            return Due.CUT_OFF
        if now >= self.preface_by:
            self.preface_by = math.inf
            return Due.PREFACE
        if now >= self.frame_by:
            self.frame_by = math.inf
            return Due.FRAME
        if now >= self._keepalive_at:
            due = self._keepalive(now)
            if due is not None:
                return due
        if now >= self.last_goaway_at:
            self.last_goaway_at = math.inf
            return Due.LAST_GOAWAY
        if now >= self._age_at:
            self._age_at = math.inf
            return Due.AGE
        if now >= self.idle_at:
            self.idle_at = math.inf
            return Due.IDLE
        return None

    def _keepalive(self, now: float) -> Due | None:
        # While asked, _keepalive_at is when the answer was due; any byte read since the question was an answer.
        if self._asked and self._last_read < self._keepalive_at - self._keepalive_timeout:
            self._keepalive_at = math.inf
            return Due.SILENCE
        self._asked = False
        self._keepalive_at = self._last_read + self._keepalive_time
        if now < self._keepalive_at:
            return None
        self._asked = True
        self._keepalive_at = now + self._keepalive_timeout
        return Due.PING

    def read(self, now: float, unfinished: bool, progress: bool) -> None:
        """Bytes came. ``unfinished``: they end inside a frame or header block; ``progress``: they completed something."""
        self._last_read = now
        if not unfinished:
            self.frame_by = math.inf
        elif progress or self.frame_by == math.inf:
            self.frame_by = now + self._frame_timeout

    def busy(self) -> None:
        """A call began."""
        self.idle_at = math.inf

    def idle(self, now: float) -> None:
        """The last call ended."""
        self.idle_at = now + self._idle_time
