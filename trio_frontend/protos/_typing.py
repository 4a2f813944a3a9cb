"""The types of a purerpc stub's methods, one for each cardinality, for the generated ``.pyi`` files."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Protocol, TypeAlias, TypeVar

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None

Request_contra = TypeVar("Request_contra", contravariant=True)
Response_co = TypeVar("Response_co", covariant=True)


class UnaryUnary(Protocol[Request_contra, Response_co]):
    async def __call__(self, message: Request_contra, *, metadata: Metadata = None) -> Response_co: ...


class UnaryStream(Protocol[Request_contra, Response_co]):
    def __call__(self, message: Request_contra, *, metadata: Metadata = None) -> AsyncIterator[Response_co]: ...


class StreamUnary(Protocol[Request_contra, Response_co]):
    async def __call__(self, message_aiter: AsyncIterable[Request_contra], *, metadata: Metadata = None) -> Response_co: ...


class StreamStream(Protocol[Request_contra, Response_co]):
    def __call__(
        self, message_aiter: AsyncIterable[Request_contra], *, metadata: Metadata = None
    ) -> AsyncIterator[Response_co]: ...
