"""Every bound of the server: its unit, its default, and what it protects.

Rules that hold here:

* Whatever a client can make grow, hold open or repeat has its bound here, or in :class:`http2.Limits` for what HTTP/2 itself bounds
  (streams, windows, frames, headers, floods).
* Times are seconds; ``math.inf`` switches one off. Sizes are bytes.
* The worst that a client can do by going over a bound is to lose its own call or its own connection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trio_frontend.rpc.http2 import Limits

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The bounds of one server. A value outside its range raises ValueError naming it."""

    max_connections: int = 10_000
    """Connections at a time; one more is accepted and closed at once, so that its client tries elsewhere. Bounds file descriptors
    and memory."""

    max_message_size: int = 4 * 1024 * 1024
    """Bytes of one received message, packed and unpacked (RESOURCE_EXHAUSTED). Checked before a message is buffered, and while it
    is unpacked. Bounds a call's memory."""

    send_buffer: int = 131_072
    """Bytes that a connection holds for a client that does not read; above it sending waits. Below ``http2.max_unsent``, so that
    control frames still find room. Bounds a connection's memory."""

    preface_timeout: float = 10.0
    """From accept to the client's preface and SETTINGS, the TLS handshake included. Bounds connections that say nothing."""

    headers_timeout: float = 10.0
    """For one header block to arrive whole. Bounds headers that come a byte at a time."""

    send_timeout: float = 300.0
    """For one message to get through the client's flow-control windows. The call then ends with RESOURCE_EXHAUSTED. Bounds calls
    held open by zero or tiny windows (slow read)."""

    write_timeout: float = 60.0
    """For what waits in a connection's buffer to be taken by the client's TCP window. The connection is then closed. Bounds
    connections held open by clients that stopped reading."""

    close_timeout: float = 2.0
    """For the end of a connection: its cancelled handlers to unwind, its last bytes to go out, the client to close. A handler that
    shields itself for longer loses its connection. Also bounds the end of ``serve`` when its nursery is cancelled."""

    keepalive_time: float = 60.0
    """Silence of a client after which it is sent a PING."""

    keepalive_timeout: float = 20.0
    """For that PING's ack; a connection that stays silent is closed. Finds clients that vanished without a word."""

    max_connection_idle: float = math.inf
    """For how long a connection may have no call before it is told to go (GOAWAY)."""

    max_connection_age: float = math.inf
    """Age at which a connection is told to go (GOAWAY), so that clients spread over new servers. Spread by 10 % either way, so that
    connections opened together do not all come back together."""

    max_connection_age_grace: float = math.inf
    """For the calls in flight to finish after that; the rest end with UNAVAILABLE."""

    drain_ping_timeout: float = 1.0
    """For the client to answer the PING between the two GOAWAYs of a drain: what it sent before it knew is still served."""

    http2: Limits = field(default_factory=Limits)
    """The bounds of HTTP/2 itself, per connection."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_message_size", "send_buffer"):
            _check(name, getattr(self, name), 1, 2**31 - 1)
        for name in (
            "preface_timeout",
            "headers_timeout",
            "send_timeout",
            "write_timeout",
            "keepalive_time",
            "keepalive_timeout",
            "max_connection_idle",
            "max_connection_age",
        ):
            _check(name, getattr(self, name), 1e-3, math.inf)
        for name in ("max_connection_age_grace", "drain_ping_timeout"):
            _check(name, getattr(self, name), 0, math.inf)
        # An infinite one would let a client or a handler hold the server's end for ever.
        _check("close_timeout", self.close_timeout, 0, 3600)
        if self.send_buffer > self.http2.max_unsent:
            raise ValueError(
                f"send_buffer is {self.send_buffer}; it must not be over http2.max_unsent ({self.http2.max_unsent})"
            )


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
