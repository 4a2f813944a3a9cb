"""``--api-key``: who may call. An interceptor for :mod:`trio_frontend.rpc`.

Every call but those of the health service, which probes make that know no key, must bring ``authorization: Bearer KEY``.
A key is compared in a time that does not depend on how much of it is right, and is never logged.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from trio_frontend.rpc.call import Call
from trio_frontend.rpc.interceptors import Interceptor
from trio_frontend.rpc.status import StatusCode, StatusError

__all__ = ["require_api_key"]

OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
SCHEME = "bearer"


def require_api_key(keys: Iterable[str]) -> Interceptor:
    """An interceptor that lets calls pass that bring one of ``keys`` (at least one); others end with UNAUTHENTICATED."""
    accepted = [key.encode() for key in keys]
    if not accepted:
        raise ValueError("keys: at least one is needed")

    @asynccontextmanager
    async def check(call: Call) -> AsyncIterator[None]:
        if call.service_name not in OPEN_SERVICES and not _holds_key(call.metadata.get("authorization"), accepted):
            raise StatusError(StatusCode.UNAUTHENTICATED, "a valid API key is needed: authorization: Bearer KEY")
        yield

    def interceptor(call: Call) -> AbstractAsyncContextManager[Any]:
        return check(call)

    return interceptor


def _holds_key(authorization: str | bytes | None, accepted: list[bytes]) -> bool:
    if not isinstance(authorization, str):
        return False
    # the scheme's case does not matter (RFC 9110 section 11.1)
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != SCHEME:
        return False
    given = key.strip().encode()
    # all are compared: which one was right shows no more than how much of it was
    matches = [hmac.compare_digest(given, known) for known in accepted]
    return any(matches)
