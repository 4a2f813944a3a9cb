"""Interceptors: code around every call, for authentication, logging, metrics, tracing.

Rules that hold here:

* An interceptor is called with the Call and returns an async context manager; the handler runs inside. The first given is outermost.
* It runs in the call's task and scope: a cancel or a deadline ends it like the handler. What it raises before its yield ends the
  call as if the handler had raised it (so authentication raises StatusError), and the handler does not run.
* When it is left, ``call.status`` is what the call is about to end with (CANCELLED, though nothing is sent, when the client has
  gone); raising StatusError there changes it, and ``call.set_trailing_metadata`` still counts.
* Requests that ask for no method (a wrong path, no POST) never become calls, so no interceptor sees them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from trio_frontend.rpc.call import Call

__all__ = ["Interceptor", "serve_intercepted"]

Interceptor: TypeAlias = "Callable[[Call], AbstractAsyncContextManager[Any]]"


async def serve_intercepted(
    call: Call, interceptors: Sequence[Interceptor], serve: Callable[[Call], Awaitable[None]]
) -> None:
    """Run ``serve(call)`` inside ``interceptors``."""
    async with AsyncExitStack() as stack:
        for interceptor in interceptors:
            await stack.enter_async_context(interceptor(call))
        try:
            await serve(call)
        except BaseException as exc:
            call.state_outcome(exc)
            raise
        call.state_outcome(None)
