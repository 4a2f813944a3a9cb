"""How often a peer may do what costs us more than it costs the peer.

Rules:
- A budget fills with time, up to its burst; a spend it cannot cover means that the connection ends (RFC 9113 10.5).
- Time is passed in, in seconds, and never goes back.
"""

from __future__ import annotations

from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError
from trio_frontend.rpc.http2.limits import Limits, Rate


class Budget:
    """A token bucket that ends the connection when it is empty."""

    __slots__ = ("_at", "_burst", "_left", "_per_second", "_what")

    def __init__(self, what: str, rate: Rate) -> None:
        self._what = what
        self._per_second = rate.per_second
        self._burst = float(rate.burst)
        self._left = self._burst
        self._at = 0.0

    def spend(self, now: float) -> None:
        """Take one; raises ProtocolError(ENHANCE_YOUR_CALM) if there is none."""
        if now > self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
            self._at = now
        if self._left < 1.0:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")
        self._left -= 1.0

    def earn(self, amount: int) -> None:
        """Give back what the peer was asked for."""
        self._left = min(self._burst, self._left + amount)


class PingPolicy:
    """Which PINGs are too many, as gRPC's keepalive rules have it: a few in quick succession, while we send nothing."""

    __slots__ = ("_last", "_max_strikes", "_min_interval", "strikes")

    def __init__(self, limits: Limits) -> None:
        self._min_interval = limits.min_ping_interval
        self._max_strikes = limits.max_ping_strikes
        self._last = float("-inf")
        self.strikes = 0

    def received(self, now: float) -> None:
        """Count a PING; raises ProtocolError(ENHANCE_YOUR_CALM), with the debug data that gRPC clients look for."""
        if now - self._last < self._min_interval:
            self.strikes += 1
            if self.strikes > self._max_strikes:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last = now
