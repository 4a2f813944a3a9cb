"""Statuses: what a call ends with, and how an exception becomes one.

Rules that hold here:

* An exception becomes a status in one function, :func:`status_of`, and nowhere else.
* A handler's own failure is INTERNAL and its text stays in the server's log: it may hold secrets, a status is public.
* A status made of an exception group is that of the one status error inside; nurseries are strict, so a handler with a nursery of
  its own raises groups.
* grpc-message is percent-encoded UTF-8 (gRPC over HTTP/2, "Responses"); rich details are a serialized google.rpc.Status in
  ``grpc-status-details-bin`` (gRPC's richer error model).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import trio
from purerpc.grpclib.exceptions import RpcFailedError
from purerpc.grpclib.status import Status, StatusCode

__all__ = [
    "RpcFailedError",
    "Status",
    "StatusCode",
    "StatusError",
    "details_of",
    "percent_encode",
    "status_of",
    "status_trailers",
]

MAX_ENCODED_MESSAGE: Final = 4096
"""Bytes of grpc-message at most, percent-encoded: clients take 8 KiB of trailers (grpc-core's soft limit), and a status cut
short is worth more than one that the client drops."""

OK: Final[Status] = Status(StatusCode.OK)
INTERNAL_STATUS: Final[Status] = Status(StatusCode.INTERNAL, "internal error")


class Detail(Protocol):
    """A protobuf message that goes into a status's details."""

    DESCRIPTOR: Any

    def SerializeToString(self) -> bytes: ...


class StatusError(RpcFailedError):  # type: ignore[misc]
    """Ends a call with ``code`` and ``message``; ``details`` are protobuf messages for ``grpc-status-details-bin``.

    A detail of type google.protobuf.Any is taken as it is, any other is packed into one. ``code`` must not be OK: a call that
    went well returns.
    """

    def __init__(self, code: StatusCode, message: str = "", details: Iterable[Detail] = ()) -> None:
        if code is StatusCode.OK:
            raise ValueError("StatusError: code must not be OK")
        super().__init__(Status(code, message))
        self.code = code
        self.message = message
        self.details = tuple(details)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else str(self.code.name)


def status_of(exc: BaseException) -> tuple[Status, RpcFailedError | None]:
    """The status that ``exc``, out of a handler, ends its call with, and the status error it came from.

    The second value is None for a failure of the handler's own (which the caller logs). Cancelled leaves of a group say nothing
    about the call and are passed over; a group with anything beside status errors is a failure of the handler's.
    """
    first: RpcFailedError | None = None
    for leaf in _leaves(exc):
        if isinstance(leaf, RpcFailedError) and leaf.status.status_code is not StatusCode.OK:
            first = first or leaf
        elif not isinstance(leaf, trio.Cancelled):
            return INTERNAL_STATUS, None
    if first is None:
        return INTERNAL_STATUS, None
    return first.status, first


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def status_trailers(status: Status, error: BaseException | None = None) -> list[tuple[bytes, bytes]]:
    """The trailers that state ``status``, with the details of ``error`` if it is a StatusError that has some."""
    trailers = [(b"grpc-status", b"%d" % status.status_code.value)]
    if status.status_message:
        trailers.append((b"grpc-message", percent_encode(status.status_message)))
    if isinstance(error, StatusError) and error.details:
        trailers.append((b"grpc-status-details-bin", b64encode(details_of(error)).rstrip(b"=")))
    return trailers


_UNESCAPED = frozenset(range(0x20, 0x7F)) - {0x25}
_ESCAPES: Final = tuple(bytes([i]) if i in _UNESCAPED else b"%%%02X" % i for i in range(256))


def percent_encode(message: str) -> bytes:
    """``message`` as a grpc-message value, cut at MAX_ENCODED_MESSAGE bytes and never inside a character.

    Leading and trailing spaces are escaped too: HTTP (RFC 9110 section 5.5) takes them off a field's value.
    """
    parts: list[bytes] = []
    size = 0
    for character in message:
        part = b"".join(map(_ESCAPES.__getitem__, character.encode("utf-8", "replace")))
        size += len(part)
        if size > MAX_ENCODED_MESSAGE - 6:
            break
        parts.append(part)
    if parts and parts[0] == b" ":
        parts[0] = b"%20"
    if parts and parts[-1] == b" ":
        parts[-1] = b"%20"
    return b"".join(parts)


def details_of(error: StatusError) -> bytes:
    """``error`` as a serialized google.rpc.Status: code = 1, message = 2, details = 3 (google/rpc/status.proto)."""
    out = b"\x08" + _varint(error.code.value)
    if error.message:
        out += _length_delimited(0x12, error.message.encode("utf-8", "replace"))
    for detail in error.details:
        out += _length_delimited(0x1A, _as_any(detail))
    return out


def _as_any(detail: Detail) -> bytes:
    """google.protobuf.Any: type_url = 1, value = 2."""
    name = detail.DESCRIPTOR.full_name
    serialized = detail.SerializeToString()
    if name == "google.protobuf.Any":
        return serialized
    return _length_delimited(0x0A, b"type.googleapis.com/" + name.encode()) + _length_delimited(0x12, serialized)


def _length_delimited(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
