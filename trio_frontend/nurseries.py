"""A nursery that is nobody's business but its owner's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

__all__ = ["open_private_nursery"]


@asynccontextmanager
async def open_private_nursery() -> AsyncIterator[trio.Nursery]:
    """Like ``trio.open_nursery()``, but a failure that comes alone comes as it is, not in a group of one.

    For a nursery that callers do not know of: what they get from a function should not depend on whether it has one.
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
            error.__context__ = context  # not the group, in which a traceback would show the failure twice
            del context, error, group
