"""Metadata: the custom headers and trailers of a call.

Rules that hold here (gRPC over HTTP/2, "Custom-Metadata"):

* Names are lower-case letters, digits, ``_ - .``; those of the protocol itself (pseudo-headers, ``grpc-*``, content-type, te and
  HTTP's connection fields) are reserved: handlers see only what the caller set, and may not send them.
* A name that ends in ``-bin`` has bytes as its value, base64 on the wire: padded or not when it comes, never padded when it goes.
  A comma in such a value separates two values.
* Any other value is printable ASCII. CR, LF and NUL would let a value write headers of its own: they are refused going out, and
  the HTTP/2 layer refuses them coming in.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

__all__ = ["Metadata", "MetadataValue", "encode_metadata"]

MetadataValue = str | bytes

_NAME: Final = re.compile(r"[0-9a-z_.\-]+")
_ASCII_VALUE: Final = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_RESERVED: Final = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class Metadata(Mapping[str, MetadataValue]):
    """What a caller sent with its call: an immutable mapping of names to values, several for a name if it was repeated.

    ``metadata[name]`` is the first value, :meth:`get_all` gives all of them, :meth:`pairs` all pairs in the order they came.
    Values are str, or bytes for names that end in ``-bin``. Names are looked up as they are on the wire, in lower case.
    """

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[tuple[str, MetadataValue]] = ()) -> None:
        self._pairs = tuple(pairs)

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
        """Metadata of header fields as HTTP/2 delivers them. Raises ValueError, naming the field, for a broken ``-bin`` value."""
        pairs: list[tuple[str, MetadataValue]] = []
        for raw_name, raw_value in headers:
            name = raw_name.decode("latin-1")
            if name.endswith("-bin"):
                pairs.extend((name, _decode_binary(name, part)) for part in raw_value.split(b","))
            else:
                pairs.append((name, raw_value.decode("latin-1")))
        return cls(pairs)

    def get_all(self, name: str) -> list[MetadataValue]:
        """All values of ``name``, in the order they came."""
        return [value for key, value in self._pairs if key == name]

    def pairs(self) -> tuple[tuple[str, MetadataValue], ...]:
        """All pairs of name and value, in the order they came."""
        return self._pairs

    def __getitem__(self, name: str) -> MetadataValue:
        for key, value in self._pairs:
            if key == name:
                return value
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        # Mapping's own asks __getitem__, and pays for an exception.
        return name in [key for key, _ in self._pairs]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for key, _ in self._pairs))

    def __len__(self) -> int:
        return len({key for key, _ in self._pairs})

    def __repr__(self) -> str:
        # Values may be credentials.
        return f"<Metadata {', '.join(self)}>"


def _decode_binary(name: str, value: bytes) -> bytes:
    value = value.strip()
    try:
        return b64decode(value.rstrip(b"=") + b"=" * (-len(value.rstrip(b"=")) % 4), validate=True)
    except ValueError:
        raise ValueError(f"metadata {name}: value is not base64") from None


def encode_metadata(
    metadata: Mapping[str, MetadataValue] | Iterable[tuple[str, MetadataValue]],
) -> list[tuple[bytes, bytes]]:
    """``metadata`` as header fields to send. Raises ValueError or TypeError naming the field that cannot be sent.

    A mapping has one value a name; pairs may repeat one.
    """
    items = metadata.items() if isinstance(metadata, Mapping) else metadata
    return [_encode_pair(name, value) for name, value in items]


def _encode_pair(name: str, value: MetadataValue) -> tuple[bytes, bytes]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"metadata name {name!r}: expected lower-case letters, digits, '_', '-', '.'")
    if name.startswith("grpc-") or name in _RESERVED:
        raise ValueError(f"metadata name {name!r} is reserved")
    if name.endswith("-bin"):
        if not isinstance(value, bytes):
            raise TypeError(f"metadata {name}: a -bin value must be bytes, not {type(value).__name__}")
        return name.encode(), b64encode(value).rstrip(b"=")
    if not isinstance(value, str):
        raise TypeError(
            f"metadata {name}: value must be str, not {type(value).__name__} (names of binary values end in -bin)"
        )
    if not _ASCII_VALUE.fullmatch(value):
        raise ValueError(f"metadata {name}: value must be printable ASCII without spaces around it")
    return name.encode(), value.encode()
