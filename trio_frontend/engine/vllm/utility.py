"""Utility calls: methods of ``EngineCore`` that a frontend calls by name. Which are under way, and what their answers mean."""

from __future__ import annotations

import itertools
import re
from typing import Any

import trio

from trio_frontend.engine.base import UnsupportedCallError, UtilityCallError
from trio_frontend.engine.vllm import wire

__all__ = ["PendingCall", "PendingCalls"]


class PendingCall:
    """One call to one engine, until it is answered or the engine is gone."""

    __slots__ = ("_done", "_error", "_result", "call_id", "method")

    def __init__(self, call_id: int, method: str) -> None:
        self.call_id = call_id
        self.method = method
        self._done = trio.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def answer(self, output: wire.UtilityOutput) -> None:
        if output.failure_message is not None:
            self.fail(_failure(self.method, output.failure_message))
            return
        try:
            self._result = wire.decode_utility_result(output.result)
        except wire.WireError as error:
            self.fail(UtilityCallError(self.method, str(error)))
        else:
            self._done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    async def wait(self) -> Any:
        """The result, or the failure raised."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class PendingCalls:
    """The calls that one engine has not answered yet, by id."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, method: str) -> PendingCall:
        call = PendingCall(next(self._ids), method)
        self._calls[call.call_id] = call
        return call

    def forget(self, call: PendingCall) -> None:
        """Nobody waits for it any more; an answer that still comes is dropped."""
        self._calls.pop(call.call_id, None)

    def answer(self, output: wire.UtilityOutput) -> None:
        call = self._calls.pop(output.call_id, None)
        if call is not None:
            call.answer(output)

    def fail_all(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(UtilityCallError(call.method, reason))


def _failure(method: str, message: str) -> Exception:
    """An engine looks the method up by name; one that has not got it answers with Python's own AttributeError text."""
    if re.search(rf"has no attribute '{re.escape(method)}'", message):
        return UnsupportedCallError(method)
    # EngineCoreProc._invoke_utility_method says which method failed; the exception does so already.
    return UtilityCallError(method, message.removeprefix(f"Call to {method} method failed: "))
