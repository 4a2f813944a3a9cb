"""The embedded engine: a model in this process, stepped in a worker thread, scheduled from one Trio task.

Rules that hold here:

* One step at a time, in a thread; all that others may see (streams, health, queues) changes in Trio's thread, between steps.
* A request that ends, for whatever reason, is marked so at once; its cache is freed at once if no step runs, and by the
  end of the running step otherwise. A step is bounded, so is the wait for one at closing.
* A step that fails is the end of the engine: health first, then every request, then the refusal of new ones.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
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
    OutputStream,
    UnsupportedCallError,
    UtilityCallError,
)
from trio_frontend.engine.embedded.guidance import Grammar, GrammarCompiler
from trio_frontend.engine.embedded.loading import SHIPPED_MODEL, LoadedModel, load_model
from trio_frontend.engine.embedded.sequence import Sequence
from trio_frontend.engine.embedded.stepper import PREFILL_TOKENS, Stepper, StepResult

__all__ = ["EmbeddedEngine", "open_engine", "run_engine"]

logger = logging.getLogger(__name__)

MAX_LIVE_SEQUENCES = 64
"""Default of ``max_live_sequences``: sequences that hold a KV cache and advance at every step."""

MAX_WAITING_SEQUENCES = 4096
"""Default of ``max_waiting_sequences``: requests that wait for one of those places. One more is refused."""

# Grammars are compiled beside the steps; two at a time leave a core to the model.
_COMPILERS = 2

_PAUSE_MODES = ("abort", "wait", "keep")


@asynccontextmanager
async def open_engine(
    path: Path | None = None,
    *,
    max_live_sequences: int = MAX_LIVE_SEQUENCES,
    max_waiting_sequences: int = MAX_WAITING_SEQUENCES,
    max_logprobs: int = 20,
    threads: int | None = None,
) -> AsyncIterator[EmbeddedEngine]:
    """Load a model's directory (None: the one shipped in the package) and run it until the block is left.

    The directory has the usual exported layout: model.onnx (input_ids, attention_mask, position_ids, past_key_values.* ->
    logits, present.*), config.json, generation_config.json, tokenizer.json. ``threads`` for one operator of the model, None
    chooses by its size. Raises UnreadableModelError. Requests that are live when the block is left end with EngineError.
    """
    directory = SHIPPED_MODEL if path is None else path
    model = await trio.to_thread.run_sync(load_model, directory, threads)
    logger.info("model loaded", extra={"path": str(directory), "max_model_len": model.max_model_len})
    async with run_engine(
        model,
        max_live_sequences=max_live_sequences,
        max_waiting_sequences=max_waiting_sequences,
        max_logprobs=max_logprobs,
    ) as engine:
        yield engine


@asynccontextmanager
async def run_engine(
    model: LoadedModel,
    *,
    max_live_sequences: int = MAX_LIVE_SEQUENCES,
    max_waiting_sequences: int = MAX_WAITING_SEQUENCES,
    max_logprobs: int = 20,
) -> AsyncIterator[EmbeddedEngine]:
    """Like :func:`open_engine`, with a model that is loaded already."""
    engine = EmbeddedEngine(model, max_live_sequences, max_waiting_sequences, max_logprobs)
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine._run)
            try:
                yield engine
            except Exception as error:  # noqa: BLE001
                # Raised below as it is; out of the nursery it would come in an ExceptionGroup, and this nursery is not the caller's.
                failure = error
            finally:
                engine._close()
                nursery.cancel_scope.cancel()
    finally:
        # Here, for the nursery's exit raises Cancelled when we are cancelled meanwhile: that must not take the failure's place.
        if failure is not None:
            raise failure


class EmbeddedEngine(Engine):
    """See :func:`open_engine`, which makes it."""

    def __init__(self, model: LoadedModel, max_live_sequences: int, max_waiting_sequences: int, max_logprobs: int) -> None:
        if max_live_sequences < 1:
            raise ValueError(f"max_live_sequences must be at least 1, not {max_live_sequences}")
        self.health: AsyncValue[EngineHealth] = AsyncValue(EngineHealth(EngineState.SERVING))
        info = EngineInfo(
            max_model_len=model.max_model_len,
            vllm_version="embedded",
            instance_id=uuid.uuid4().hex,
            max_num_seqs=max_live_sequences,
            max_num_batched_tokens=PREFILL_TOKENS,
        )
        self._capabilities = Capabilities(model.max_model_len, (info,), max_logprobs=max_logprobs)
        self._model = model
        self._max_live = max_live_sequences
        self._max_waiting = max_waiting_sequences
        self._stepper = Stepper(model.session, model.max_batch_rows)
        self._compiler = GrammarCompiler(model.tokenizer_file, model.session.vocab_size, model.eos_token_ids)
        self._compiler_limiter = trio.CapacityLimiter(_COMPILERS)
        self._step_limiter = trio.CapacityLimiter(1)
        # By priority (lower first), then arrival.
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._requests: dict[str, Sequence] = {}
        self._stepping = False
        self._paused: str | None = None
        # Set when there may be something to do, or (for pause_scheduler's wait) nothing any more.
        self._changed = trio.Event()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def live_requests(self) -> int:
        return sum(not sequence.ended for sequence in self._requests.values())

    @property
    def cached_sequences(self) -> int:
        """Sequences that hold a KV cache now: at most ``max_live_sequences``, and none that has ended, but for a step's length."""
        return self._stepper.cached_sequences

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[OutputStream]:
        """See :meth:`Engine.generate`. What this engine cannot do (a constraint that its compiler refuses) is an EngineError with
        the code ``validation_error``, before anything runs."""
        self._refuse_if_failed()
        self._check_prompt(request)
        if request.data_parallel_rank not in (None, 0):
            raise DataParallelRankError(
                f"data parallel rank {request.data_parallel_rank} is not there: this engine has rank 0 only"
            )
        grammar = await self._compile(request)
        sequence = Sequence(request, grammar, self._model.session.vocab_size, self._model.max_model_len)
        self._enqueue(sequence)
        try:
            yield sequence.outputs
        finally:
            sequence.outputs.close()
            self._end(sequence)
            del self._requests[request.request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            sequence = self._requests.get(request_id)
            if sequence is not None and not sequence.ended:
                sequence.outputs.put(EngineOutput([], finish_reason=FinishReason.ABORT))
                self._end(sequence)

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """pause_scheduler(mode, clear_cache), resume_scheduler(), is_scheduler_paused() and is_sleeping(), as in vLLM's EngineCore.

        Paused, new requests wait; "abort" ends those that run, "wait" lets them end, "keep" stops them where they are.
        """
        await trio.lowlevel.checkpoint()
        if method == "is_scheduler_paused":
            return [self._paused is not None]
        if method == "is_sleeping":
            return [False]  # it has no sleep mode
        if method == "resume_scheduler":
            self._paused = None
            self._wake()
            return [None]
        if method == "pause_scheduler":
            await self._pause(*args, timeout=timeout)
            return [None]
        raise UnsupportedCallError(method)

    async def _pause(self, mode: str = "abort", clear_cache: bool = True, *, timeout: float | None) -> None:
        # There is no prefix cache to clear.
        if mode not in _PAUSE_MODES:
            raise UtilityCallError("pause_scheduler", f"invalid pause mode: {mode}")
        self._paused = mode
        if mode == "abort":
            self.abort(list(self._requests))
        self._wake()
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            while self._stepping or (mode == "wait" and self._has_live_sequences()):
                await self._changed.wait()
            return
        raise UtilityCallError("pause_scheduler", f"requests still run after {timeout} s")

    # Requests come and go.

    def _refuse_if_failed(self) -> None:
        health = self.health.value
        if not health.serving:
            raise EngineUnavailableError(f"the embedded engine is not running: {health.detail}")

    def _check_prompt(self, request: EngineRequest) -> None:
        """The model fails on such a prompt, and with it every request: the one thing that is not left to trust."""
        prompt, vocab_size = request.prompt_token_ids, self._model.session.vocab_size
        if not 0 < len(prompt) < self._model.max_model_len:
            raise _invalid(f"prompt_token_ids: {len(prompt)} tokens do not fit a context of {self._model.max_model_len}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise _invalid(f"prompt_token_ids: an id is outside the model's vocabulary of {vocab_size}")

    async def _compile(self, request: EngineRequest) -> Grammar | None:
        constraint = request.sampling.structured_output
        if constraint is None:
            await trio.lowlevel.checkpoint()
            return None
        try:
            # Whoever gives up meanwhile, or shuts down, does not wait for a compiler that may take many seconds.
            return await trio.to_thread.run_sync(
                self._compiler.compile, constraint, abandon_on_cancel=True, limiter=self._compiler_limiter
            )
        except ValueError as error:
            raise _invalid(str(error)) from error

    def _enqueue(self, sequence: Sequence) -> None:
        self._refuse_if_failed()
        request = sequence.request
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is live already")
        if len(self._waiting) >= self._max_waiting:
            raise EngineUnavailableError(f"{self._max_waiting} requests wait already for the embedded engine")
        self._requests[request.request_id] = sequence
        heapq.heappush(self._waiting, (request.priority, next(self._arrivals), sequence))
        self._wake()

    def _end(self, sequence: Sequence) -> None:
        """Nobody waits for this sequence any more: out of the queue, out of the cache."""
        if sequence.ended:
            return
        sequence.ended = True
        if any(entry[2] is sequence for entry in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
        elif not self._stepping:
            self._stepper.drop_ended()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # The scheduler's task.

    def _has_live_sequences(self) -> bool:
        return any(not sequence.ended for sequence in self._stepper.sequences)

    def _admit(self) -> None:
        live = sum(not sequence.ended for sequence in self._stepper.sequences)
        while self._waiting and live < self._max_live:
            self._stepper.add(heapq.heappop(self._waiting)[2])
            live += 1

    async def _run(self) -> None:
        while True:
            if self._paused is None:
                self._admit()
            if self._paused in ("abort", "keep") or not self._has_live_sequences():
                self._stepper.drop_ended()  # otherwise the next step does it, in its thread
                await self._changed.wait()
            elif not await self._step():
                return

    async def _step(self) -> bool:
        """One step and the delivery of what it brought. False: it failed, and the engine with it."""
        results: list[StepResult] = []
        failure: Exception | None = None
        self._stepping = True
        try:
            results = await trio.to_thread.run_sync(self._stepper.step, limiter=self._step_limiter)
        except Exception as error:
            # Whatever a step raises, the sequences' state is lost with it.
            logger.exception("the embedded engine failed")
            failure = error
        finally:
            self._stepping = False
        if failure is not None:
            self._fail(EngineState.UNHEALTHY, f"a step of the model failed: {failure}")
            return False
        for sequence, result in results:
            if isinstance(result, EngineOutput):
                sequence.outputs.put(result)
            else:
                sequence.outputs.close_with_error(result)
            if sequence.done:
                sequence.ended = True
        self._wake()
        return True

    def _fail(self, state: EngineState, detail: str) -> None:
        if not self.health.value.serving:
            return
        self.health.value = EngineHealth(state, detail)
        for sequence in self._requests.values():
            sequence.outputs.close_with_error(EngineError())
            sequence.ended = True
        self._waiting.clear()
        if not self._stepping:
            self._stepper.drop_ended()
        self._wake()

    def _close(self) -> None:
        self._fail(EngineState.LOST, "it is closed")


def _invalid(message: str) -> EngineError:
    return EngineError(message, code="validation_error")
