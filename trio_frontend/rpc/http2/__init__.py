"""A server's side of HTTP/2 (RFC 9113) without I/O: bytes in, events out; calls in, bytes out. See `Connection`."""

from __future__ import annotations

from trio_frontend.rpc.http2.connection import Connection
from trio_frontend.rpc.http2.errors import ErrorCode, LocalProtocolError, ProtocolError, StreamClosed
from trio_frontend.rpc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoAwayReceived,
    Headers,
    PingAcked,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from trio_frontend.rpc.http2.header_blocks import encode_headers
from trio_frontend.rpc.http2.limits import Limits, Rate

__all__ = [
    "Connection",
    "ConnectionFailed",
    "DataReceived",
    "ErrorCode",
    "Event",
    "GoAwayReceived",
    "Headers",
    "Limits",
    "LocalProtocolError",
    "PingAcked",
    "ProtocolError",
    "Rate",
    "RequestReceived",
    "StreamClosed",
    "StreamReset",
    "TrailersReceived",
    "WindowUpdated",
    "encode_headers",
]
