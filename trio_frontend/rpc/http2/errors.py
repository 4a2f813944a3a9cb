"""What can go wrong, and how far it reaches.

Rules:
- A peer's fault is a ProtocolError. It ends the connection, unless it is a StreamError, which ends one stream (RFC 9113 5.4).
- Both are raised and caught inside this package: the caller of `Connection.receive_data` sees events, never an exception.
- The caller's own fault (sending what the stream's state or the window does not allow) is a LocalProtocolError.
"""

from __future__ import annotations

import enum


class ErrorCode(enum.IntEnum):
    """The error codes of RFC 9113 section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ProtocolError(Exception):
    """The peer broke a rule, or used up what a connection may cost.

    `code` goes into the frame that says so; `reason` is plain ASCII, fit for GOAWAY's debug data and for a log.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


class StreamError(ProtocolError):
    """The peer broke a rule on one stream; the connection goes on."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(code, reason)
        self.stream_id = stream_id


class LocalProtocolError(Exception):
    """The caller asked for what HTTP/2 does not allow; nothing was sent."""


class StreamClosed(LocalProtocolError):
    """The stream is not, or no longer, open for sending: it ended, was reset, or its connection failed."""
