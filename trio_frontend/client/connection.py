"""A client's side of one gRPC connection, without I/O: bytes in, events out; calls in, bytes out.

It is purerpc's own client connection (h2 inside), with what purerpc leaves out:

* RST_STREAM and GOAWAY, in and out, are events and calls; calls in flight survive a GOAWAY that lets them (RFC 9113 6.8).
* Windows are bounded: 1 MiB a stream, 16 MiB the connection, and the peer's frames 16 KiB. The consumer opens the stream's
  window again with :meth:`Connection.acknowledge`; the connection's window is opened as bytes come, so that one call
  whose answers nobody reads does not stop the others.
* A malformed response fails its call, not the connection.
* A failure of the connection is one exception, :class:`ConnectionBrokenError`.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import unquote

import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from purerpc.grpclib.config import GRPCConfiguration
from purerpc.grpclib.connection import GRPCConnection
from purerpc.grpclib.exceptions import GRPCError
from purerpc.grpclib.status import Status, StatusCode

__all__ = [
    "Connection",
    "ConnectionBrokenError",
    "DataReceived",
    "ErrorCodes",
    "Event",
    "GoAwayReceived",
    "ResponseEnded",
    "ResponseStarted",
    "StreamReset",
    "WindowOpened",
]

# hpack writes every header that it encodes into the log at DEBUG, credentials among them.
logging.getLogger("hpack").setLevel(logging.INFO)

STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 16 << 20
SETTINGS_FRAME = 0x4
MAX_SECONDS_IN_MICROSECONDS = 99
"""A grpc-timeout has at most 8 digits, so microseconds end there and whole seconds begin."""

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class ConnectionBrokenError(Exception):
    """The peer broke the protocol; the connection is of no further use. A GOAWAY for it is in the output."""


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    stream_id: int
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class DataReceived:
    """``flow_controlled_length`` bytes, padding included, are taken from the stream's window."""

    stream_id: int
    data: bytes
    flow_controlled_length: int


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """The server is done with the stream, with a status of its own or the one that stands for what it sent."""

    stream_id: int
    status: Status
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class StreamReset:
    stream_id: int
    error_code: int


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """There may be more room to send, on one stream or (0) on all."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class GoAwayReceived:
    """No new streams; those above ``last_stream_id`` were not seen by the server."""

    last_stream_id: int
    error_code: int
    debug: bytes


Event = ResponseStarted | DataReceived | ResponseEnded | StreamReset | WindowOpened | GoAwayReceived


class Connection(GRPCConnection):  # type: ignore[misc]  # purerpc has no types
    """See the module. Its output is in ``out``; the driver takes it."""

    def __init__(self, user_agent: str) -> None:
        super().__init__(GRPCConfiguration(client_side=True, user_agent=user_agent))
        self.out = bytearray()
        self._unopened = 0
        self._beginning = b""
        h2_connection = self.h2_connection
        h2_connection.decoder.max_header_list_size = 16_384
        # When a GOAWAY comes h2 closes the connection and throws its output away. Here the streams go on; not opening new
        # ones is the channel's business.
        state_machine = h2_connection.state_machine
        states, inputs = h2.connection.ConnectionState, h2.connection.ConnectionInputs
        state_machine._transitions = {
            **state_machine._transitions,
            (states.CLIENT_OPEN, inputs.RECV_GOAWAY): (None, states.CLIENT_OPEN),
        }
        h2_connection.clear_outbound_data_buffer = lambda: None
        h2_connection.initiate_connection()
        h2_connection.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        self._take()

    def _set_h2_connection_local_settings(self) -> None:
        self.h2_connection.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                SettingCodes.MAX_FRAME_SIZE: 16_384,
                SettingCodes.MAX_HEADER_LIST_SIZE: 16_384,
            },
        )
        self.h2_connection.max_inbound_frame_size = 16_384

    def _take(self) -> None:
        self.out += self.data_to_send()

    def can_open_stream(self) -> bool:
        """Whether the server's SETTINGS_MAX_CONCURRENT_STREAMS leaves room for one more."""
        return bool(self.h2_connection.open_outbound_streams < self.h2_connection.remote_settings.max_concurrent_streams)

    def open_stream(
        self,
        scheme: str,
        authority: str,
        service: str,
        method: str,
        timeout: float,
        metadata: Iterable[tuple[str, str | bytes]],
    ) -> int:
        """Send a request's headers; ``timeout`` in seconds goes along as grpc-timeout, unless infinite."""
        stream_id: int = self.get_next_available_stream_id()
        self.start_request(
            stream_id,
            scheme,
            service,
            method,
            authority=authority,
            timeout=_timeout(timeout),
            content_type_suffix="+proto",
            custom_metadata=metadata,
        )
        self._take()
        return stream_id

    def sendable(self, stream_id: int) -> int:
        """How many bytes the stream may send now: the smaller window, at most one frame."""
        return int(self.flow_control_window(stream_id))

    def send(self, stream_id: int, data: bytes | memoryview, end_stream: bool = False) -> None:
        self.send_data(stream_id, bytes(data), end_stream)
        self._take()

    def reset(self, stream_id: int, error_code: ErrorCodes) -> None:
        """Tell the server that we are no longer interested, unless it is through with the stream anyway."""
        try:
            self.reset_stream(stream_id, error_code)
        except (h2.exceptions.StreamClosedError, h2.exceptions.NoSuchStreamError):
            return
        self._take()

    def acknowledge(self, stream_id: int, length: int) -> None:
        """Let the server send ``length`` bytes more on this stream."""
        try:
            self.h2_connection.increment_flow_control_window(length, stream_id)
        except (KeyError, h2.exceptions.StreamClosedError, h2.exceptions.NoSuchStreamError):
            return
        self._take()

    def receive(self, data: bytes) -> list[Event]:
        """What the server's bytes mean. Raises ConnectionBrokenError if they mean nothing."""
        if len(self._beginning) < 9:
            self._check_beginning(data)
        try:
            events: list[Event] = self.receive_data(data)
        # h2 of this release lets some errors of its parts through: bad frames, undecodable and empty header names
        except (h2.exceptions.H2Error, GRPCError, ValueError, LookupError) as error:
            raise ConnectionBrokenError(str(error) or type(error).__name__) from error
        finally:
            self._take()
        return events

    def _check_beginning(self, data: bytes) -> None:
        # A server's first frame is SETTINGS (RFC 9113 section 3.4); h2 would wait for as many bytes as "HTT" is in its length field.
        self._beginning = (self._beginning + data)[:9]
        if len(self._beginning) >= 4 and self._beginning[3] != SETTINGS_FRAME:
            raise ConnectionBrokenError(f"it does not speak HTTP/2, its first bytes are {self._beginning!r}")

    # From h2's events to ours; the names are those that GRPCConnection.receive_data calls.

    def _response_received(self, event: h2.events.ResponseReceived) -> list[Event]:
        headers = dict(event.headers)
        status = _refusal(headers)
        if event.stream_ended or status is not None:
            return [ResponseEnded(event.stream_id, status or _status(headers), _metadata(event.headers))]
        return [ResponseStarted(event.stream_id, _metadata(event.headers))]

    def _trailers_received(self, event: h2.events.TrailersReceived) -> list[Event]:
        return [ResponseEnded(event.stream_id, _status(dict(event.headers)), _metadata(event.headers))]

    def _data_received(self, event: h2.events.DataReceived) -> list[Event]:
        self._unopened += event.flow_controlled_length
        if self._unopened >= CONNECTION_WINDOW // 2:
            self.h2_connection.increment_flow_control_window(self._unopened)
            self._unopened = 0
        return [DataReceived(event.stream_id, event.data, event.flow_controlled_length)]

    def _stream_ended(self, event: h2.events.StreamEnded) -> list[Event]:
        # after trailers the call has its status and takes no other
        return [
            ResponseEnded(event.stream_id, Status(StatusCode.INTERNAL, "the server ended the call without a status"), ())
        ]

    def _stream_reset(self, event: h2.events.StreamReset) -> list[Event]:
        return [StreamReset(event.stream_id, int(event.error_code))]

    def _window_updated(self, event: h2.events.WindowUpdated) -> list[Event]:
        return [WindowOpened(event.stream_id or 0)]

    def _remote_settings_changed(self, event: h2.events.RemoteSettingsChanged) -> list[Event]:
        return [WindowOpened(0)]

    def _connection_terminated(self, event: h2.events.ConnectionTerminated) -> list[Event]:
        return [GoAwayReceived(event.last_stream_id, int(event.error_code), event.additional_data or b"")]


def _timeout(seconds: float) -> timedelta | None:
    """As purerpc writes it: microseconds if there is a fraction, whole seconds if not. Rounded up: our own clock is the judge."""
    if math.isinf(seconds):
        return None
    if seconds > MAX_SECONDS_IN_MICROSECONDS:
        return timedelta(seconds=min(math.ceil(seconds), 99_999_999))
    return timedelta(microseconds=max(1, math.ceil(seconds * 1_000_000)))


def _refusal(headers: dict[str, str]) -> Status | None:
    """What to make of response headers that are not gRPC's (gRPC over HTTP/2, "Responses"; HTTP to gRPC status mapping)."""
    http_status = headers.get(":status", "")
    if http_status != "200":
        code = {
            "400": StatusCode.INTERNAL,
            "401": StatusCode.UNAUTHENTICATED,
            "403": StatusCode.PERMISSION_DENIED,
            "404": StatusCode.UNIMPLEMENTED,
            "429": StatusCode.UNAVAILABLE,
            "502": StatusCode.UNAVAILABLE,
            "503": StatusCode.UNAVAILABLE,
            "504": StatusCode.UNAVAILABLE,
        }.get(http_status, StatusCode.UNKNOWN)
        return Status(code, f"the server answered HTTP status {http_status}")
    content_type = headers.get("content-type", "")
    if not content_type.startswith("application/grpc"):
        return Status(StatusCode.UNKNOWN, f"the server answered content-type {content_type!r}, not application/grpc")
    encoding = headers.get("grpc-encoding", "identity")
    if encoding != "identity":
        return Status(StatusCode.INTERNAL, f"the server answered grpc-encoding {encoding!r}, which was not offered")
    return None


def _status(trailers: dict[str, str]) -> Status:
    text = trailers.get("grpc-status", "")
    if not (text.isascii() and text.isdigit()):
        return Status(StatusCode.UNKNOWN, f"the server ended the call with grpc-status {text!r}")
    return Status(int(text), unquote(trailers.get("grpc-message", "")))


def _metadata(headers: Iterable[tuple[str, str]]) -> Metadata:
    """The headers that are neither HTTP's nor gRPC's own. Binary values that do not decode are left out."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.startswith((":", "grpc-")) or name == "content-type":
            continue
        if not name.endswith("-bin"):
            metadata.append((name, value))
            continue
        for part in value.split(","):
            try:
                metadata.append((name, base64.b64decode(part + "=" * (-len(part) % 4), validate=True)))
            except binascii.Error:
                continue
    return metadata


def check_metadata(metadata: Iterable[tuple[Any, Any]]) -> list[tuple[str, str | bytes]]:
    """The same, if it can be sent: names in lower case, text printable ASCII, bytes under names in -bin. Raises ValueError."""
    checked: list[tuple[str, str | bytes]] = []
    for name, value in metadata:
        bare = name.replace("-", "").replace("_", "").replace(".", "")
        if not (bare.isascii() and bare.isalnum() and bare == bare.lower()) or name.startswith("grpc-"):
            raise ValueError(f"metadata name {name!r}: lower-case ASCII letters, digits, '-', '_', '.', and not grpc-*")
        if name.endswith("-bin") is not isinstance(value, bytes):
            raise ValueError(f"metadata {name!r}: bytes go under names that end in -bin, text under others")
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            # the value may be a secret
            raise ValueError(f"metadata {name!r}: its text is not printable ASCII")
        checked.append((name, value))
    return checked
