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
        try:
            # The group would be its context, and every traceback would show the failure twice.
            raise error from error.__cause__
        finally:
            del error, group
