"""How a long-running part of the server ends when the nursery around it is cancelled: in order, and in bounded time.

Rule: the cancellation is heard at once, and turned into the part's own orderly stop; only what has not stopped after the bound is
cancelled the hard way. Cancelled is raised again in any case.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

__all__ = ["run_orderly"]


async def run_orderly(run: Callable[[], Awaitable[None]], stop: Callable[[], None], bound: float) -> None:
    """Run ``run()`` behind a shield. When the caller is cancelled, call ``stop()`` and give it ``bound`` seconds to end.

    An exception of ``run`` comes out in an ExceptionGroup, like any task's.
    """
    shield = trio.CancelScope(shield=True)
    done = trio.Event()

    async def shielded() -> None:
        with shield:
            await run()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shielded)
        try:
            await done.wait()
        except trio.Cancelled:
            stop()
            shield.deadline = trio.current_time() + bound
            raise
