"""What makes a request's header and trailer section well-formed (RFC 9113 8.2 and 8.3).

Rules:
- A section that breaks a rule is malformed, which costs the request its stream and nothing more (RFC 9113 8.1.1).
- Names and values stay bytes. What gRPC asks beyond HTTP/2 (method, content type, te: trailers present) is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Field = tuple[bytes, bytes]

NO_BODY_LENGTH = -1

# RFC 9113 8.2.1 refuses upper case, spaces, controls and bytes above 0x7e; RFC 9110 5.6.2 has the characters of a token.
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_NOT_IN_VALUE = re.compile(rb"[\0\r\n]")
_LENGTH = re.compile(rb"[0-9]{1,18}")

_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
# Sound names without a rule of their own: what a gRPC client sends with every request need not be looked at again.
_PLAIN = frozenset(
    b"accept accept-encoding authorization content-type grpc-accept-encoding grpc-encoding grpc-timeout tracestate traceparent "
    b"user-agent x-request-id".split()
)
_CONNECTION_SPECIFIC = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))


class Malformed(Exception):
    """A section that breaks a rule; the text says which, in ASCII and without the value."""


def check_request(headers: Iterable[Field]) -> int:
    """Check a request's header section. Returns its content-length, or -1; raises Malformed."""
    pseudo: dict[bytes, bytes] = {}
    host: bytes | None = None
    length = NO_BODY_LENGTH
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular:
                raise Malformed("a pseudo-header field after a regular one")
            if name not in _PSEUDO:
                raise Malformed("an unknown pseudo-header field")
            if name in pseudo:
                raise Malformed("a pseudo-header field twice")
            if not _is_sound(value):
                raise Malformed("a pseudo-header field with a character that is not allowed")
            pseudo[name] = value
            continue
        regular = True
        if name in _PLAIN and _is_sound(value):
            continue
        _check_regular(name, value)
        if name == b"content-length":
            if length != NO_BODY_LENGTH or not _LENGTH.fullmatch(value):
                raise Malformed("a content-length that is not one number")
            length = int(value)
        elif name == b"host":
            if host is not None:
                raise Malformed("two host fields")
            host = value
    _check_pseudo(pseudo, host)
    return length


def check_trailers(headers: Iterable[Field]) -> None:
    """Check a request's trailer section, where a pseudo-header field is one with a bad name; raises Malformed."""
    for name, value in headers:
        _check_regular(name, value)


def check_field(name: bytes, value: bytes) -> None:
    """Check one field that is to be sent; raises ValueError naming it."""
    if name != b":status" and not _NAME.fullmatch(name):
        raise ValueError(f"header name {name!r} has a character that HTTP/2 does not allow")
    if not _is_sound(value):
        raise ValueError(f"the value of header {name!r} has a character that HTTP/2 does not allow")


def _check_regular(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise Malformed("a field name with a character that is not allowed")
    if not _is_sound(value):
        raise Malformed("a field value with a character that is not allowed")
    if name in _CONNECTION_SPECIFIC:
        raise Malformed("a connection-specific field")
    if name == b"te" and value.lower() != b"trailers":
        raise Malformed("te other than trailers")


def _is_sound(value: bytes) -> bool:
    """RFC 9113 8.2.1: no NUL, CR or LF, and no space or tab at either end."""
    return len(value.strip(b" \t")) == len(value) and not _NOT_IN_VALUE.search(value)


def _check_pseudo(pseudo: dict[bytes, bytes], host: bytes | None) -> None:
    authority = pseudo.get(b":authority")
    method = pseudo.get(b":method")
    if not method:
        raise Malformed("no :method")
    if method == b"CONNECT":
        # RFC 9113 8.5
        if b":scheme" in pseudo or b":path" in pseudo or not authority:
            raise Malformed("CONNECT with a scheme or path, or without authority")
    elif not pseudo.get(b":scheme"):
        raise Malformed("no :scheme")
    elif not pseudo.get(b":path"):
        raise Malformed("no :path")
    if host is not None and authority is not None and host.lower() != authority.lower():
        raise Malformed("a host that differs from :authority")
