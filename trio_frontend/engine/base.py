"""What an engine is: the requests it takes, the outputs it gives, its health, and how one is told to stop.

Rules that hold here:

* A service knows engines by this module alone; an engine's package imports this module and no service.
* Everything in an :class:`EngineRequest` has been checked. An engine may trust it (a vLLM engine core does, blindly).
* ``engine.generate(request)`` is a scope. Leaving it, for whatever reason, tells the engine to stop, at once and without waiting.
* An engine's reader never waits for a consumer. Outputs queue in the request's own channel, in order, and that channel
  is bounded by the request's ``max_tokens``.
* The first error closes the channel: what was queued before it is still delivered, then :class:`EngineError` is raised.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from trio_util import AsyncValue

__all__ = [
    "Capabilities",
    "DataParallelRankError",
    "Engine",
    "EngineError",
    "EngineHealth",
    "EngineInfo",
    "EngineOutput",
    "EngineRequest",
    "EngineState",
    "EngineUnavailableError",
    "FinishReason",
    "LogprobsLists",
    "LoraRequest",
    "OutputStream",
    "SamplingParams",
    "StructuredOutput",
    "UnsupportedCallError",
    "UtilityCallError",
]


class FinishReason(enum.IntEnum):
    """Why an engine ended a request; the numbers are the wire's (``vllm.v1.engine.FinishReason``)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


StructuredOutputKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]


@dataclass(slots=True, frozen=True)
class StructuredOutput:
    """A constraint on the generated text, already compiled once to prove that it can be.

    ``value`` is the constraint's source: a JSON schema, a regular expression, an EBNF or Lark grammar, a structural
    tag (JSON), a tuple of choices, or None for ``json_object``. ``backend`` is the engine's compiler
    (xgrammar, guidance, outlines).
    """

    kind: StructuredOutputKind
    value: str | tuple[str, ...] | None
    backend: str = "xgrammar"


@dataclass(slots=True)
class SamplingParams:
    """How tokens are picked and when to stop, with neutral defaults. All token ids are inside the vocabulary.

    ``logprobs``: None for none, k >= 0 for the sampled token and the k likeliest, -1 for the whole vocabulary.
    ``logprob_token_ids``: instead of the likeliest, these (in this order). ``stop_token_ids`` excludes EOS:
    ``eos_token_id`` is the model's first EOS, further ones come in ``extra_eos_token_ids``; ``ignore_eos`` switches
    all of those off. ``min_tokens``: before that many tokens neither EOS nor stop ids end the request.
    ``max_tokens`` is always at least 1 and fits the context.
    Stop strings are no business of an engine: services match them and leave the scope.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    eos_token_id: int | None = None
    extra_eos_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    skip_reading_prefix_cache: bool = False
    extra_args: Mapping[str, Any] | None = None


@dataclass(slots=True, frozen=True)
class LoraRequest:
    """A loaded LoRA adapter, as an engine knows it."""

    name: str
    id: int
    path: str


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate.

    ``request_id`` is unique in this process and what the engine sees; ``external_request_id`` is the caller's own, which
    need not be unique. ``data_parallel_rank`` None lets the client balance. ``mm_features`` are preprocessed media
    features, passed through as they are.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    external_request_id: str = ""
    priority: int = 0
    session_id: str | None = None
    cache_salt: str | None = None
    lora: LoraRequest | None = None
    data_parallel_rank: int | None = None
    trace_headers: Mapping[str, str] | None = None
    mm_features: Sequence[Any] | None = None


@dataclass(slots=True)
class LogprobsLists:
    """Logprobs of n tokens with k candidates each (``vllm.v1.outputs.LogprobsLists``).

    ``token_ids`` int [n, k+1], ``logprobs`` float32 [n, k+1], column 0 the token itself; ``ranks`` int [n], the 1-based rank
    of the token itself. For prompt logprobs n is one less than the prompt's length: the first token has none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class EngineOutput:
    """What one engine step brought for one request. ``finish_reason`` is set on the last one, never ERROR."""

    __slots__ = (
        "ec_transfer_params",
        "finish_reason",
        "kv_transfer_params",
        "logprobs",
        "prompt_logprobs",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        logprobs: LogprobsLists | None = None,
        prompt_logprobs: LogprobsLists | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        ec_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params

    def __repr__(self) -> str:
        return (
            f"EngineOutput({list(self.token_ids)}, finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


class EngineError(Exception):
    """The engine failed this request. ``code`` is what the engine stated (0.33 ``RequestError``), None if it said nothing."""

    def __init__(
        self, message: str = "engine failed during generation", *, code: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable


class EngineUnavailableError(Exception):
    """No engine can take this request now: it never started, so it may be tried elsewhere."""


class DataParallelRankError(ValueError):
    """The request asks for a data-parallel rank that no connected engine has."""


class UtilityCallError(Exception):
    """The engine ran a utility call and it failed there, or gave no answer in time. ``method`` is its name."""

    def __init__(self, method: str, message: str) -> None:
        super().__init__(f"{method} failed: {message}")
        self.method = method
        self.message = message


class UnsupportedCallError(Exception):
    """This engine, or this release of it, has no such utility call."""

    def __init__(self, method: str) -> None:
        super().__init__(f"the engine has no {method}")
        self.method = method


class EngineState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    STALLED = "engine_stalled"
    """Requests run and nothing comes. Ends when outputs flow."""
    UNHEALTHY = "engine_unhealthy"
    """The engine said that it failed, or could no longer be understood. Sticky until a new handshake."""
    LOST = "engine_lost"
    """The engine's process or connection is gone. Sticky until a new handshake."""


@dataclass(slots=True, frozen=True)
class EngineHealth:
    state: EngineState
    detail: str = ""

    @property
    def serving(self) -> bool:
        return self.state is EngineState.SERVING


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """One engine core's ready response, reduced to what services use; ``raw`` has all of it."""

    rank: int = 0
    max_model_len: int = 0
    num_gpu_blocks: int = 0
    block_size: int = 0
    effective_attention_block_size: int | None = None
    vllm_version: str = ""
    instance_id: str = ""
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    decode_context_parallel_size: int = 1
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    supports_lora: bool = False
    max_loras: int = 0
    kv_events_config: Mapping[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Capabilities:
    """What the engine can do. ``engines`` has one entry per engine core, by rank; empty before the first handshake.

    ``max_logprobs``: the largest k of ``SamplingParams.logprobs`` (vLLM's ``--max-logprobs``), -1 for no limit.
    """

    max_model_len: int
    engines: tuple[EngineInfo, ...] = ()
    supports_lora: bool = False
    supports_multimodal: bool = False
    max_logprobs: int = 20


Sink = Callable[[EngineOutput], bool]
"""Takes an output in the engine's reader, without blocking. False: not taken, queue it instead."""


class OutputStream(abc.ABC):
    """The outputs of one request: an async iterator of batches, each all that waits (at least one output).

    Ends after the output with a finish_reason. Raises EngineError after what was delivered, if the engine failed.

    ``set_sink`` is the fast path: while the consumer waits in ``__anext__`` and nothing is queued, the engine's reader offers
    each output **that is not the last one** to the sink instead of waking the consumer. A sink that returns False
    gets the output queued, and the consumer woken. A sink must not raise and must not block.
    """

    @abc.abstractmethod
    def __aiter__(self) -> OutputStream: ...

    @abc.abstractmethod
    async def __anext__(self) -> list[EngineOutput]: ...

    @abc.abstractmethod
    def set_sink(self, sink: Sink | None) -> None: ...


class Engine(abc.ABC):
    """An engine that is open: made by an async context manager, which closes it."""

    health: AsyncValue[EngineHealth]
    """Changes from SERVING to a failure before the requests that die with it are ended."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abc.abstractmethod
    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[OutputStream]:
        """Start ``request``; leaving the scope before its last output tells the engine to stop, without waiting.

        Raises EngineUnavailableError if no engine can take it, DataParallelRankError for a rank that is not there.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests (internal ids; unknown ones are ignored): each stream gets, after what is queued, a last output
        with finish_reason ABORT and no tokens, and the engine is told. Does not wait."""

    @abc.abstractmethod
    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``EngineCore.<method>(*args)`` on every engine core and return their results in the order of ranks.

        ``timeout`` in seconds; None takes the engine's default. Raises UtilityCallError, UnsupportedCallError,
        EngineUnavailableError.
        """

    @property
    @abc.abstractmethod
    def live_requests(self) -> int:
        """Requests in this engine now: what tests and metrics look at for leaks."""
