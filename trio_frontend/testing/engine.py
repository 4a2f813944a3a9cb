"""An engine for tests. It computes nothing: the test sees each request and says what the engine answers.

By hand::

    engine = ScriptedEngine()
    async with engine.generate(request) as outputs:
        handle = await engine.next_request()
        handle.send([5])
        handle.send([6], finish_reason=FinishReason.LENGTH)

With a script, which answers every request in a task of the test's nursery, on Trio's clock (and so on an autojump clock)::

    nursery.start_soon(engine.play, lambda request: one_token_per_step([5, 6, 7]), 0.02)
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio_util import AsyncValue

from trio_frontend.engine.base import (
    Capabilities,
    DataParallelRankError,
    Engine,
    EngineError,
    EngineHealth,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    LogprobsLists,
    OutputStream,
    UnsupportedCallError,
    UtilityCallError,
)
from trio_frontend.engine.outputs import RequestOutputs

__all__ = ["Script", "ScriptedEngine", "ScriptedRequest", "one_token_per_step"]

MAX_UNSEEN_REQUESTS = 10_000
"""Requests that may wait for ``next_request``; one more is refused, so that a test that forgot them finds out."""

Script = Callable[[EngineRequest], Iterable[EngineOutput | EngineError]]
"""What the engine answers to a request, one item a step. An error ends it; without a finish_reason at the end nothing more comes."""

UtilityAnswer = Callable[..., Any]
"""``answer(method, *args)`` gives the list of results, one for each engine core (or an awaitable of it), or raises."""


def one_token_per_step(
    token_ids: Sequence[int],
    finish_reason: FinishReason = FinishReason.LENGTH,
    stop_reason: int | str | None = None,
) -> Iterator[EngineOutput]:
    """A script's answer: each token an output of its own, the last one with ``finish_reason``."""
    for position, token_id in enumerate(token_ids, start=1):
        if position < len(token_ids):
            yield EngineOutput([token_id])
        else:
            yield EngineOutput([token_id], finish_reason=finish_reason, stop_reason=stop_reason)


class ScriptedRequest:
    """A request as the engine sees it, and the means to answer it.

    ``aborted`` is set when the engine was told to stop before its last output: the scope was left, or ``Engine.abort`` named it.
    ``closed`` is set when the scope was left, for whatever reason.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.aborted = trio.Event()
        self.closed = trio.Event()
        self.outputs = RequestOutputs(request.sampling.max_tokens)

    def __repr__(self) -> str:
        return f"<ScriptedRequest {self.request.request_id!r}{' ended' if self.outputs.finished else ''}>"

    @property
    def finished(self) -> bool:
        """It has had its last output or an error, or its scope was left: what is sent now goes nowhere."""
        return self.outputs.finished

    def send(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: LogprobsLists | None = None,
        prompt_logprobs: LogprobsLists | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        """Deliver one step's output, as the engine's reader would: at once and without blocking."""
        self.put(
            EngineOutput(
                token_ids, logprobs, prompt_logprobs, finish_reason, stop_reason, kv_transfer_params, ec_transfer_params
            )
        )

    def put(self, output: EngineOutput) -> None:
        """Like ``send``, with a ready-made output."""
        self.outputs.put(output)

    def fail(self, error: EngineError | None = None) -> None:
        """End the request with ``error``, after what was sent."""
        self.outputs.close_with_error(error if error is not None else EngineError())


class ScriptedEngine(Engine):
    """See the module. It needs no opening or closing: it owns no task and no socket.

    ``utility`` answers utility calls; without one every call is unsupported. ``requests`` has every request ever taken, in
    order, ``utility_calls`` every utility call as (method, args).
    """

    def __init__(self, *, capabilities: Capabilities | None = None, utility: UtilityAnswer | None = None) -> None:
        if capabilities is None:
            info = EngineInfo(max_model_len=2048, vllm_version="scripted", instance_id="scripted-0", max_num_seqs=256)
            capabilities = Capabilities(max_model_len=2048, engines=(info,))
        self.health: AsyncValue[EngineHealth] = AsyncValue(EngineHealth(EngineState.SERVING))
        self.utility = utility
        self.requests: list[ScriptedRequest] = []
        self.utility_calls: list[tuple[str, tuple[Any, ...]]] = []
        self._capabilities = capabilities
        self._live: dict[str, ScriptedRequest] = {}
        self._arrive: trio.MemorySendChannel[ScriptedRequest]
        self._arrived: trio.MemoryReceiveChannel[ScriptedRequest]
        self._arrive, self._arrived = trio.open_memory_channel(MAX_UNSEEN_REQUESTS)

    # The test's side.

    async def next_request(self) -> ScriptedRequest:
        """The next request that came and was not seen yet; waits for one."""
        return await self._arrived.receive()

    async def play(
        self, script: Script, pace: float = 0.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer every request with ``script``, one item each ``pace`` seconds of Trio's clock, until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                nursery.start_soon(self._answer, await self.next_request(), script, pace)

    @property
    def live(self) -> tuple[ScriptedRequest, ...]:
        """The requests that are in the engine now."""
        return tuple(self._live.values())

    def set_capabilities(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities

    def set_health(self, state: EngineState, detail: str = "") -> None:
        """Change the health, and nothing else."""
        self.health.value = EngineHealth(state, detail)

    def fail(self, state: EngineState = EngineState.UNHEALTHY, detail: str = "scripted failure") -> None:
        """Fail as an engine does: health first, then every live request ends with EngineError; new ones are refused."""
        self.set_health(state, detail)
        for handle in self.live:
            handle.fail(EngineError())

    # The engine's side.

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[OutputStream]:
        health = self.health.value
        if health.state not in (EngineState.SERVING, EngineState.STALLED):
            raise EngineUnavailableError(f"the engine cannot take requests: {health.detail or health.state.value}")
        ranks = [info.rank for info in self._capabilities.engines]
        if request.data_parallel_rank is not None and request.data_parallel_rank not in ranks:
            raise DataParallelRankError(f"data parallel rank {request.data_parallel_rank} is not one of {ranks}")
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is live already")
        handle = ScriptedRequest(request)
        try:
            self._arrive.send_nowait(handle)
        except trio.WouldBlock:
            raise EngineUnavailableError(f"{MAX_UNSEEN_REQUESTS} requests wait and nothing calls next_request") from None
        self.requests.append(handle)
        self._live[request.request_id] = handle
        try:
            yield handle.outputs
        finally:
            del self._live[request.request_id]
            if not handle.finished:
                handle.aborted.set()
            handle.outputs.close()
            handle.closed.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            handle = self._live.get(request_id)
            if handle is not None and not handle.finished:
                handle.send([], finish_reason=FinishReason.ABORT)
                handle.aborted.set()

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        self.utility_calls.append((method, args))
        if self.utility is None:
            raise UnsupportedCallError(method)
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            await trio.lowlevel.checkpoint()
            results = self.utility(method, *args)
            if inspect.isawaitable(results):
                results = await results
            return list(results)
        raise UtilityCallError(method, f"no answer within {timeout} s")

    @property
    def live_requests(self) -> int:
        """Requests whose scope is open and whose end has not been sent."""
        return sum(not handle.finished for handle in self._live.values())

    async def _answer(self, handle: ScriptedRequest, script: Script, pace: float) -> None:
        for item in script(handle.request):
            await trio.sleep(pace)
            if handle.finished:
                return
            if isinstance(item, EngineError):
                handle.fail(item)
            else:
                handle.put(item)
