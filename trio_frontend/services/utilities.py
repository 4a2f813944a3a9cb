"""Utility calls on behalf of ``vllm.Control``: one change at a time, to every engine, failures as statuses.

Rules that hold here:

* What changes an engine's state runs under one lock, so that two callers' changes never interleave over several engines.
  A question takes no lock: while a pause waits for running requests, whether it is paused can still be asked.
* Every engine is asked, and all must answer alike; what they answer is checked, for it comes from another process.
* A failure becomes a status in one function, :func:`as_status`: the call's name and what went wrong.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from trio_frontend.engine.base import Engine, EngineUnavailableError, UnsupportedCallError, UtilityCallError
from trio_frontend.rpc.status import StatusCode, StatusError

__all__ = ["NO_LIMIT", "Utilities", "as_status"]

NO_LIMIT = math.inf
"""Seconds to wait for what takes as long as it takes: running requests to finish, weights to load. The caller's deadline
and cancel still end the wait."""

Answer = TypeVar("Answer")


class Utilities:
    """An engine's utility calls, as the control service makes them. ``operation`` is the name that a failure bears."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = trio.Lock()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Hold the lock over several calls that belong together."""
        async with self._lock:
            yield

    async def call(self, operation: str, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``EngineCore.<method>(*args)`` on every engine, inside :meth:`change` if it changes something.

        Returns the answers in the order of ranks. Raises StatusError: INTERNAL if it failed there, UNIMPLEMENTED if there
        is no such call, UNAVAILABLE if there is no engine.
        """
        try:
            return await self._engine.call_utility(method, *args, timeout=timeout)
        except (UtilityCallError, UnsupportedCallError, EngineUnavailableError) as error:
            raise as_status(operation, error) from error

    async def call_first(
        self, operation: str, methods: tuple[str, ...], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Like :meth:`call`, with the first of ``methods`` that the engine has: releases have different names for a thing."""
        *newer, oldest = methods
        for method in newer:
            try:
                return await self._engine.call_utility(method, *args, timeout=timeout)
            except UnsupportedCallError:
                continue
            except (UtilityCallError, EngineUnavailableError) as error:
                raise as_status(operation, error) from error
        return await self.call(operation, oldest, *args, timeout=timeout)

    async def ask(self, operation: str, method: str, answer_type: type[Answer]) -> Answer:
        """A question that every engine must answer alike, with an ``answer_type``. Raises StatusError as :meth:`call` does."""
        answers = await self.call(operation, method)
        return one_answer(operation, method, answers, answer_type)


def one_answer(operation: str, method: str, answers: list[Any], answer_type: type[Answer]) -> Answer:
    """The answer that all gave. Raises StatusError(INTERNAL) if they differ, or are none or no ``answer_type``."""
    for answer in answers:
        if type(answer) is not answer_type:
            raise StatusError(
                StatusCode.INTERNAL,
                f"{operation} failed: {method} returned {answer!r}, a {answer_type.__name__} was expected",
            )
    if len(set(answers)) != 1:
        raise StatusError(StatusCode.INTERNAL, f"{operation} failed: the engines' answers to {method} differ: {answers}")
    first: Answer = answers[0]
    return first


def as_status(operation: str, error: UtilityCallError | UnsupportedCallError | EngineUnavailableError) -> StatusError:
    """What a failed utility call is to the caller of ``operation``."""
    if isinstance(error, UnsupportedCallError):
        return StatusError(StatusCode.UNIMPLEMENTED, f"{operation} is not supported: {error}")
    if isinstance(error, EngineUnavailableError):
        return StatusError(StatusCode.UNAVAILABLE, f"{operation} failed: {error}")
    return StatusError(StatusCode.INTERNAL, f"{operation} failed: {error}")
