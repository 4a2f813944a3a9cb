"""What a request's headers ask for: a method, or a refusal. A pure function of the headers.

Rules that hold here, in the order in which they are checked (gRPC over HTTP/2, "Requests"; the order is grpclib's):

1. the HTTP method is POST: 405
2. content-type is application/grpc, or application/grpc+proto: 415
3. te is trailers, so that no proxy in between drops them: 400
4. the path is /service/method: UNIMPLEMENTED
5. grpc-timeout is one: 400, INTERNAL
6. the service and the method are served: UNIMPLEMENTED
7. grpc-encoding is one we can unpack: UNIMPLEMENTED, and grpc-accept-encoding says what can be
8. ``-bin`` metadata is base64: 400, INTERNAL

A refusal is one block of headers that ends the stream (gRPC's Trailers-Only); whatever HTTP status it has, grpc-status and
grpc-message are there too. It ends that call and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from trio_frontend.rpc.http2 import encode_headers
from trio_frontend.rpc.messages import ACCEPT_ENCODING
from trio_frontend.rpc.metadata import Metadata
from trio_frontend.rpc.methods import Method
from trio_frontend.rpc.status import StatusCode, percent_encode
from trio_frontend.rpc.timeout import parse_timeout

__all__ = ["Refusal", "Request", "check_request"]

_PROTOCOL_FIELDS: Final = frozenset(
    {
        b":method",
        b":scheme",
        b":path",
        b":authority",
        b"host",
        b"content-type",
        b"content-length",
        b"te",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
    }
)
_CONTENT_TYPES: Final = frozenset({b"application/grpc", b"application/grpc+proto"})
_ENCODINGS: Final = frozenset({b"identity", b"gzip"})


class Request:
    """A request that may be served. ``timeout`` in seconds (math.inf: none); ``authority`` is what the client called us.

    Two requests with the same headers may share one: it does not change.
    """

    __slots__ = ("_custom", "_metadata", "accepts_gzip", "authority", "encoding", "method", "timeout")

    def __init__(
        self,
        method: Method,
        authority: str,
        timeout: float,
        encoding: bytes,
        accepts_gzip: bool,
        custom: list[tuple[bytes, bytes]],
    ) -> None:
        self.method = method
        self.authority = authority
        self.timeout = timeout
        self.encoding = encoding
        self.accepts_gzip = accepts_gzip
        self._custom = custom
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = Metadata.from_headers(self._custom)
        return self._metadata


class Refusal:
    """The answer to a request that is not served: ``block`` is its HPACK headers, which end the stream."""

    __slots__ = ("block", "code", "message")

    def __init__(
        self,
        code: StatusCode,
        message: str,
        http_status: bytes = b"200",
        extra: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self.code = code
        self.message = message
        self.block = encode_headers(
            [
                (b":status", http_status),
                (b"content-type", b"application/grpc"),
                (b"grpc-status", b"%d" % code.value),
                (b"grpc-message", percent_encode(message)),
                *extra,
            ]
        )


def check_request(
    headers: Iterable[tuple[bytes, bytes]], methods: Mapping[bytes, Method], services: frozenset[bytes]
) -> Request | Refusal:
    """The request that ``headers`` make, or why it is refused."""
    fields: dict[bytes, bytes] = {}
    custom: list[tuple[bytes, bytes]] = []
    binary = False
    for field in headers:
        name, value = field
        if name in _PROTOCOL_FIELDS:
            # A repeated field is one list (RFC 9110 section 5.2).
            fields[name] = value if name not in fields else fields[name] + b"," + value
        else:
            custom.append(field)
            if name.endswith(b"-bin"):
                binary = True

    method = methods.get(fields.get(b":path", b""))
    if (
        fields.get(b":method") != b"POST"
        or fields.get(b"content-type") not in _CONTENT_TYPES
        or fields.get(b"te") != b"trailers"
        or method is None
    ):
        refusal = _refusal(fields, methods, services)
        if refusal is not None:
            return refusal
        method = methods[fields[b":path"]]

    timeout = math.inf
    if b"grpc-timeout" in fields:
        try:
            timeout = parse_timeout(fields[b"grpc-timeout"])
        except ValueError as exc:
            return Refusal(StatusCode.INTERNAL, str(exc), b"400")
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding not in _ENCODINGS:
        message = f"grpc-encoding {encoding[:32].decode('latin-1')} is not supported"
        return Refusal(StatusCode.UNIMPLEMENTED, message, extra=[(b"grpc-accept-encoding", ACCEPT_ENCODING)])
    accepts_gzip = b"gzip" in map(bytes.strip, fields.get(b"grpc-accept-encoding", b"").split(b","))
    authority = fields.get(b":authority") or fields.get(b"host", b"")
    request = Request(method, authority.decode("latin-1"), timeout, encoding, accepts_gzip, custom)
    if binary:
        try:
            request.metadata  # noqa: B018 - decoded here, where there is an answer to what cannot be
        except ValueError as exc:
            return Refusal(StatusCode.INTERNAL, str(exc), b"400")
    return request


def _refusal(fields: dict[bytes, bytes], methods: Mapping[bytes, Method], services: frozenset[bytes]) -> Refusal | None:
    """Why a request without the plain headers of a gRPC call is refused; None if its headers mean the same."""
    http_method = fields.get(b":method", b"")
    if http_method != b"POST":
        message = f"HTTP method {_shown(http_method)}: gRPC calls are POST"
        return Refusal(StatusCode.UNKNOWN, message, b"405", [(b"allow", b"POST")])
    content_type = fields.get(b"content-type", b"")
    if content_type.partition(b";")[0].strip().lower() not in _CONTENT_TYPES:
        return Refusal(StatusCode.UNKNOWN, f"content-type {_shown(content_type)}: expected application/grpc", b"415")
    if b"trailers" not in fields.get(b"te", b"").replace(b" ", b"").lower().split(b","):
        return Refusal(StatusCode.INTERNAL, "te: trailers is missing; a proxy in between does not speak gRPC", b"400")
    path = fields.get(b":path", b"")
    slash, _, rest = path.partition(b"/")
    service, separator, name = rest.rpartition(b"/")
    if slash or not separator or not service or not name:
        return Refusal(StatusCode.UNIMPLEMENTED, f"path {_shown(path)}: expected /service/method")
    # A bad timeout is told before an unknown method: the order of the checks is part of the contract.
    try:
        parse_timeout(fields.get(b"grpc-timeout", b"1S"))
    except ValueError as exc:
        return Refusal(StatusCode.INTERNAL, str(exc), b"400")
    if service not in services:
        return Refusal(StatusCode.UNIMPLEMENTED, f"unknown service {_shown(service)}")
    if path not in methods:
        return Refusal(StatusCode.UNIMPLEMENTED, f"unknown method {_shown(name)} of service {_shown(service)}")
    return None


def _shown(value: bytes) -> str:
    return value[:128].decode("ascii", "backslashreplace") or "(none)"
