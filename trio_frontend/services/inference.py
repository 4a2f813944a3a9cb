"""``vllm.Inference``, also under its earlier name ``vllm.Generate``: a request becomes an engine's scope, its outputs messages.

Rules that hold here:

* check, convert, engine, messages: handlers only join these. What refuses a request does so before the engine hears of it.
* The call's task owns the engine's scope. Whatever ends the task (cancel, deadline, a lost connection, a failure of its own) leaves
  the scope, and so tells the engine to stop. A stop string leaves it too, before the last message is sent.
* A stream's first message is ``prompt_info`` alone. Then one message for each engine step, or for several if the client is slower; the
  last has ``finish_info``. After an error none follows.
* What was delivered before an engine's error stays delivered.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import purerpc
import trio

from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import Capabilities, Engine, EngineError, EngineRequest, EngineUnavailableError
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.protos.vllm.inference_grpc import GenerateServicer, InferenceServicer
from trio_frontend.services import structured_outputs
from trio_frontend.services.conversion import GenerationPlan, convert, resolve_lora
from trio_frontend.services.delivery import Delivery, PromptMessage, Sender, TokenMessages, collect
from trio_frontend.services.errors import InvalidRequestError, as_status
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.registry import RequestRegistry
from trio_frontend.services.sequence import Sequence
from trio_frontend.services.validation import check_prompt_length, check_text_length, check_untruncated_length
from trio_frontend.text import GenerationDefaults, ModelFiles, StopStrings
from trio_frontend.text.stop_strings import REMEMBERED_CHARACTERS

__all__ = ["Call", "InferenceService"]

logger = logging.getLogger(__name__)

LONG_TEXT = 2048
"""Characters of a prompt that is tokenized in a worker thread: half a millisecond and more, in which no token would flow."""


LOGGED_ID_LENGTH = 200
"""Characters of an id in a log line; ids may have thousands."""

LOGGED_ERROR_LENGTH = 2000
"""Characters of an engine's error in a log line."""

T = TypeVar("T")


class Call(Sender, Protocol):
    """What a handler needs of its call (``rpc.Call`` has it)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class InferenceService:
    """Serves ``model`` from ``engine``. ``services`` are purerpc's, for ``rpc.Server``.

    ``registry`` knows the live requests for ``Control.Abort``, ``loras`` the adapters that ``lora_name`` can name.
    """

    def __init__(
        self,
        engine: Engine,
        model: ModelFiles,
        config: ServerConfig,
        registry: RequestRegistry | None = None,
        loras: LoraRegistry | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._names = config.served_model_names or (model.name,)
        self._defaults = model.generation_defaults
        if config.generation_defaults is not None:
            self._defaults = GenerationDefaults.from_mapping(config.generation_defaults)
        self._max_logprobs = config.max_logprobs
        self._backend = config.structured_outputs_backend
        self._stream_interval = config.stream_interval
        self._registry = registry if registry is not None else RequestRegistry()
        self._loras = loras if loras is not None else LoraRegistry()
        # Tokenizing and compiling need a core each; more threads would only take turns. Each has places of its own: a constraint may
        # take many seconds, and prompts must not wait for those.
        self._tokenizing = trio.CapacityLimiter(max(2, os.cpu_count() or 2))
        self._compiling = trio.CapacityLimiter(2)
        self._messages = TokenMessages()
        self.services: tuple[purerpc.Service, purerpc.Service] = (_Inference(self).service, _Generate(self).service)

    # The two methods.

    async def generate(self, message: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """Generate: the whole answer in one message."""
        with STATUSES:
            if message.sampling.num_sequences > 1:
                raise InvalidRequestError(
                    f"sampling.num_sequences must be 1 for Generate, whose answer holds one sequence, "
                    f"got {message.sampling.num_sequences}: use GenerateStream"
                )
            plan = await self._plan(message, call)
            return await self._answer(plan)

    async def generate_stream(self, message: pb.GenerateRequest, call: Call) -> None:
        """GenerateStream: the answer as it comes."""
        with STATUSES:
            plan = await self._plan(message, call)
            requests = plan.engine_requests()
            with self._registry.track(plan.external_id, [request.request_id for request in requests]):
                if len(requests) == 1:
                    await self._stream(plan, requests[0], 0, call, PromptMessage(plan, call))
                else:
                    await self._stream_all(plan, requests, call)

    # Their parts.

    async def _plan(self, message: pb.GenerateRequest, call: Call) -> GenerationPlan:
        """Everything that can refuse a request. Raises RequestError, EngineUnavailableError."""
        capabilities = self._engine.capabilities
        if capabilities.max_model_len < 1:
            raise EngineUnavailableError(
                f"the engine is not ready: {self._engine.health.value.detail or 'no handshake yet'}"
            )
        lora = resolve_lora(message.model, message.lora_name, self._names, capabilities, self._loras)
        constraint = structured_outputs.constraint_of(message.decoding, self._backend)
        plan = convert(
            message,
            await self._prompt_token_ids(message, capabilities.max_model_len),
            call.metadata,
            model=self._model,
            defaults=self._defaults,
            capabilities=capabilities,
            lora=lora,
            max_logprobs=self._logprobs_limit(capabilities),
            structured_outputs_backend=self._backend,
        )
        if constraint is not None and not structured_outputs.is_known(constraint):
            await _in_thread(partial(structured_outputs.compile_constraint, constraint), self._compiling)
        stops = plan.output.stop_strings
        if stops and sum(map(len, stops)) > REMEMBERED_CHARACTERS:
            plan.stop_strings = await _in_thread(partial(StopStrings, stops), self._tokenizing)
        return plan

    async def _prompt_token_ids(self, message: pb.GenerateRequest, max_model_len: int) -> list[int]:
        match message.WhichOneof("prompt"):
            case "token_ids":
                ids = message.token_ids.ids
                if message.truncate_prompt_tokens:
                    check_untruncated_length(len(ids), max_model_len)
                else:
                    check_prompt_length(len(ids), max_model_len)
                return list(ids)
            case "text" if len(message.text) < LONG_TEXT:
                return self._model.tokenizer.encode(message.text)
            case "text":
                longest = None if message.truncate_prompt_tokens else self._model.tokenizer.longest_token
                check_text_length(len(message.text), longest, max_model_len)
                return await _in_thread(partial(self._model.tokenizer.encode, message.text), self._tokenizing)
            case _:
                raise InvalidRequestError("prompt is required: text or token_ids")

    def _logprobs_limit(self, capabilities: Capabilities) -> int:
        limits = [limit for limit in (self._max_logprobs, capabilities.max_logprobs) if limit >= 0]
        return min(limits, default=-1)

    def _sequence(self, plan: GenerationPlan, index: int) -> Sequence:
        return Sequence(index, plan.output, self._model.tokenizer, plan.prompt_token_ids)

    async def _answer(self, plan: GenerationPlan) -> pb.GenerateResponse:
        [request] = plan.engine_requests()
        sequence = self._sequence(plan, 0)
        with self._registry.track(plan.external_id, [request.request_id]), Logged(request):
            async with self._engine.generate(request) as outputs:
                prompt_logprobs = await collect(sequence, outputs)
        return pb.GenerateResponse(prompt_info=plan.prompt_info(prompt_logprobs), outputs=sequence.take())

    async def _stream_all(self, plan: GenerationPlan, requests: list[EngineRequest], call: Call) -> None:
        """All sequences of one request, each with an engine request of its own. The first failure ends all."""
        prompt = PromptMessage(plan, call)
        async with trio.open_nursery() as nursery:
            for index, request in enumerate(requests):
                nursery.start_soon(self._stream, plan, request, index, call, prompt)

    async def _stream(
        self, plan: GenerationPlan, request: EngineRequest, index: int, call: Call, prompt: PromptMessage
    ) -> None:
        delivery = Delivery(self._sequence(plan, index), call, self._stream_interval, self._messages.of(plan.output, index))
        with STATUSES, Logged(request):
            async with self._engine.generate(request) as outputs:
                first = await (prompt.send(outputs) if index == 0 else prompt.wait())
                last = await delivery.run(outputs, first)
            await call.send_bytes(last)


class Statuses:
    """What a request can end with becomes its status; anything else is a fault and stays what it is."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            status = as_status(error)
            if status is not None:
                raise status from error


STATUSES = Statuses()


class Logged:
    """A line for each failure of an engine's, with both ids: the caller's and the engine's."""

    __slots__ = ("_request",)

    def __init__(self, request: EngineRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, EngineError):
            request = self._request
            logger.warning(
                "the engine failed a request",
                extra={
                    "request_id": request.external_request_id[:LOGGED_ID_LENGTH],
                    "engine_request_id": request.request_id[-LOGGED_ID_LENGTH:],
                    "error": error.message[:LOGGED_ERROR_LENGTH],
                    "code": error.code,
                    "retryable": error.retryable,
                },
            )


async def _in_thread(work: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
    """Run ``work`` in a worker thread. If the call ends meanwhile it is not waited for; it keeps its place until it is done."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)


class _Inference(InferenceServicer):
    def __init__(self, inference: InferenceService) -> None:
        self._inference = inference

    async def Generate(self, message: pb.GenerateRequest, request: Call) -> pb.GenerateResponse:
        return await self._inference.generate(message, request)

    async def GenerateStream(self, message: pb.GenerateRequest, request: Call) -> None:
        await self._inference.generate_stream(message, request)


class _Generate(GenerateServicer):
    def __init__(self, inference: InferenceService) -> None:
        self._inference = inference

    async def Generate(self, message: pb.GenerateRequest, request: Call) -> pb.GenerateResponse:
        return await self._inference.generate(message, request)

    async def GenerateStream(self, message: pb.GenerateRequest, request: Call) -> None:
        await self._inference.generate_stream(message, request)
