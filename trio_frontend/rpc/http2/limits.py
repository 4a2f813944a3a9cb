"""Every bound of one connection: its unit, its default, and what it protects.

Rules:
- Whatever a peer can make grow, or make happen again and again, has its bound here; nothing else in this package has numbers
  of its own but those of RFC 9113.
- Bounds that RFC 9113 lets us announce are announced in our SETTINGS, and kept whether or not the peer heeds them.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TABLE_SIZE = 4_096  # RFC 9113 6.5.2
DEFAULT_WINDOW = 65_535  # RFC 9113 6.9.2
MAX_WINDOW = 2**31 - 1  # RFC 9113 6.9.1
MIN_MAX_FRAME_SIZE = 16_384  # RFC 9113 4.2
MAX_MAX_FRAME_SIZE = 2**24 - 1  # RFC 9113 4.2


@dataclass(frozen=True, slots=True)
class Rate:
    """A budget: `burst` at once, then `per_second`."""

    per_second: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one connection. A value outside its range raises ValueError naming it."""

    max_concurrent_streams: int = 1_000
    """Streams open at a time. One more gets REFUSED_STREAM. Bounds the tasks and buffers a peer can hold."""

    stream_window: int = 65_536
    """Bytes of request body that may wait unread on one stream (65,535 to 2^31-1). Bounds a call's memory."""

    connection_window: int = 1_048_576
    """Bytes of request body that may wait unread on all streams together (65,535 to 2^31-1). Bounds a connection's memory."""

    max_frame_size: int = 16_384
    """Bytes of the payload of one received frame (16,384 to 2^24-1), refused at its header. Bounds what is held of an unfinished
    frame."""

    max_header_block: int = 16_384
    """Bytes of one compressed header block, over HEADERS and all its CONTINUATIONs. Bounds memory and time before decoding."""

    max_continuations: int = 16
    """CONTINUATION frames in one header block, empty ones included. Bounds a flood of frames that carry nothing."""

    max_header_list_size: int = 16_384
    """Bytes of one decoded header list as RFC 9113 6.5.2 counts them (32 more per field). A list up to four times as long costs
    its stream, a longer one, which is not decoded to the end, the connection. Bounds what a small block can expand to."""

    header_cache_size: int = 32_768
    """Bytes of decoded request headers kept to recognize a repeated header block. 0 keeps none."""

    max_unsent: int = 262_144
    """Bytes of output not yet taken. Above it the caller stops reading, and `try_send_message` declines. Bounds the answers to
    PING, SETTINGS and wrong streams, and what fast producers queue for a slow reader."""

    resets: Rate = Rate(200.0, 1_000)
    """Streams that end in RST_STREAM by the peer's doing: its own resets, refused streams, malformed requests. Bounds the work of
    streams opened only to be dropped (CVE-2023-44487, CVE-2025-8671)."""

    min_ping_interval: float = 1.0
    """Seconds between two PINGs. Shorter is a strike; anything we send on a stream clears the strikes."""

    max_ping_strikes: int = 2
    """Strikes forgiven. One more ends the connection with ENHANCE_YOUR_CALM, "too_many_pings", as gRPC's keepalive has it."""

    settings: Rate = Rate(10.0, 100)
    """SETTINGS frames: each costs an answer and a walk over the streams."""

    empty_data: Rate = Rate(100.0, 1_000)
    """DATA frames without data or END_STREAM: flow control does not hold them back."""

    window_updates: Rate = Rate(1_000.0, 10_000)
    """WINDOW_UPDATE frames beyond four for each HEADERS or DATA frame sent."""

    ignored: Rate = Rate(1_000.0, 10_000)
    """Frames that have no effect: PRIORITY, unknown types, acks of nothing, GOAWAYs, and HEADERS and RST_STREAM of streams that are
    closed, which are common where calls are ended early."""

    def __post_init__(self) -> None:
        _check("max_concurrent_streams", self.max_concurrent_streams, 0, 2**31 - 1)
        _check("stream_window", self.stream_window, DEFAULT_WINDOW, MAX_WINDOW)
        _check("connection_window", self.connection_window, DEFAULT_WINDOW, MAX_WINDOW)
        _check("max_frame_size", self.max_frame_size, MIN_MAX_FRAME_SIZE, MAX_MAX_FRAME_SIZE)
        _check("max_header_block", self.max_header_block, 1, MAX_MAX_FRAME_SIZE)
        _check("max_continuations", self.max_continuations, 0, 2**31 - 1)
        _check("max_header_list_size", self.max_header_list_size, 1, MAX_MAX_FRAME_SIZE)
        _check("header_cache_size", self.header_cache_size, 0, 2**31 - 1)
        _check("max_unsent", self.max_unsent, 0, 2**31 - 1)
        _check("min_ping_interval", self.min_ping_interval, 0, 2**31 - 1)
        _check("max_ping_strikes", self.max_ping_strikes, 0, 2**31 - 1)
        for name in ("resets", "settings", "empty_data", "window_updates", "ignored"):
            rate = getattr(self, name)
            _check(f"{name}.per_second", rate.per_second, 0, 2**31 - 1)
            _check(f"{name}.burst", rate.burst, 0, 2**31 - 1)


def _check(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
