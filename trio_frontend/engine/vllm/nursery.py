"""A nursery for background tasks around a caller's block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

__all__ = ["quiet_nursery"]


@asynccontextmanager
async def quiet_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that the block knows nothing of: what the block raises comes out as it is, not in a group.

    Only a single exception is taken out of its group; when a background task failed as well, the group stays.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        error = group.exceptions[0]
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # not the group, which says nothing more
            del context, error, group  # the frame would keep its own traceback alive
