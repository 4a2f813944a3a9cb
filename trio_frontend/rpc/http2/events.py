"""What `Connection.receive_data` tells its caller, in the order in which it came.

Rules:
- Events are plain data. Names and values of fields are bytes as the peer sent them; nothing is decoded.
- A stream is announced by RequestReceived; what was refused or malformed from the start is never announced.
- After StreamReset of a stream, and after ConnectionFailed, nothing more is said about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from trio_frontend.rpc.http2.errors import ProtocolError

Headers: TypeAlias = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class RequestReceived:
    """A well-formed request (RFC 9113 8.3.1) opened a stream. Pseudo-header fields come first.

    `headers` is shared between requests with the same header block: it must not be changed.
    """

    stream_id: int
    headers: Headers
    end_stream: bool


@dataclass(slots=True)
class DataReceived:
    """A DATA frame. `flow_controlled_length` (bytes, padding included) is what to give to `Connection.acknowledge`."""

    stream_id: int
    data: bytes
    flow_controlled_length: int
    end_stream: bool


@dataclass(slots=True)
class TrailersReceived:
    """The request's trailer section, which ends the request."""

    stream_id: int
    headers: Headers


@dataclass(slots=True)
class StreamReset:
    """A stream ended early: by the peer's RST_STREAM, or by ours (queued already) on the peer's fault.

    `error_code` is a number of RFC 9113 section 7, or whatever else the peer sent.
    """

    stream_id: int
    error_code: int
    by_peer: bool


@dataclass(slots=True)
class WindowUpdated:
    """A window that let nothing through is open: a stream's, or, if `stream_id` is 0, the connection's.

    Both must be open for `Connection.sendable` to be above 0. An update of a window that is open already is not told.
    """

    stream_id: int


@dataclass(slots=True)
class PingAcked:
    """The peer answered one of our PINGs."""

    payload: bytes


@dataclass(slots=True)
class GoAwayReceived:
    """The peer is about to leave. Requests in flight may finish."""

    last_stream_id: int
    error_code: int
    debug: bytes


@dataclass(slots=True)
class ConnectionFailed:
    """The connection is over. A GOAWAY is queued already: send what is in the output, then close."""

    error: ProtocolError


Event: TypeAlias = (
    RequestReceived
    | DataReceived
    | TrailersReceived
    | StreamReset
    | WindowUpdated
    | PingAcked
    | GoAwayReceived
    | ConnectionFailed
)
