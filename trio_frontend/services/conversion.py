"""A GenerateRequest becomes a plan: what goes to the engine, and what the caller wants to get back. Pure functions.

Rules that hold here:

* A field of the proto that is 0, and not marked optional, is unset: the model's default applies, or the neutral value.
* Temperature is the exception: unset it is 0 (greedy), whatever the model's generation_config says.
* Every check is made by ``validation``, ``structured_outputs`` or ``media``; here is only what becomes what.
* Tokenizing and compiling can take long: :func:`convert` does neither. It takes the prompt's ids, and the constraint compiled.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trio_frontend.engine.base import Capabilities, EngineRequest, LogprobsLists, LoraRequest, SamplingParams
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services import validation
from trio_frontend.services.errors import InvalidRequestError, PreconditionError, UnknownNameError
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.media import check_media
from trio_frontend.services.responses import prompt_info
from trio_frontend.services.structs import mapping_of_struct
from trio_frontend.services.structured_outputs import constraint_of
from trio_frontend.text import GenerationDefaults, ModelFiles, StopStrings

__all__ = ["DATA_PARALLEL_RANK", "GenerationPlan", "OutputOptions", "convert", "resolve_lora"]

DATA_PARALLEL_RANK = "x-data-parallel-rank"

_PROCESS = secrets.token_hex(4)
"""Tells this process's internal ids from those of another frontend of the same engine, and from those before a restart."""
_numbers = itertools.count()


def _random_id() -> str:
    """A version 4 UUID (RFC 9562 section 5.4). Nobody is kept from guessing it, so it is made without the system call of uuid.uuid4()."""
    digits = f"{random.getrandbits(128):032x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


@dataclass(slots=True)
class OutputOptions:
    """What the caller wants to get back of each sequence. ``min_tokens``: stop strings complete in fewer tokens do not count."""

    text: bool = True
    token_ids: bool = False
    logprobs: bool = False
    skip_special_tokens: bool = True
    stop_strings: tuple[str, ...] = ()
    include_stop_strings: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class GenerationPlan:
    """A request that may be served: everything in it has been checked.

    ``sampling`` is the first sequence's; :meth:`engine_requests` makes all of them.
    """

    external_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    num_sequences: int
    output: OutputOptions
    prompt_token_ids_wanted: bool
    prompt_logprobs_wanted: bool
    priority: int
    session_id: str | None
    cache_salt: str | None
    lora: LoraRequest | None
    data_parallel_rank: int | None
    trace_headers: Mapping[str, str] | None
    mm_features: Sequence[Any] | None
    stop_strings: StopStrings | None = None
    """Made beforehand where that takes long, and kept: while it lives, all that are made of the same strings are made at once."""

    def prompt_info(self, logprobs: LogprobsLists | None) -> pb.PromptInfo:
        """What the caller is told of its prompt; ``logprobs`` are the engine's, if any were wanted."""
        return prompt_info(
            self.prompt_token_ids,
            token_ids_wanted=self.prompt_token_ids_wanted,
            logprobs_wanted=self.prompt_logprobs_wanted,
            logprobs=logprobs,
        )

    def engine_requests(self) -> list[EngineRequest]:
        """One for each sequence, with an internal id that no other request has.

        The seed of sequence i is the request's plus i, so that each sequence is what the same request with that seed would give.
        """
        internal_id = f"{self.external_id}-{_PROCESS}-{next(_numbers)}"
        if self.num_sequences == 1:
            return [self._engine_request(internal_id, 0)]
        return [self._engine_request(f"{internal_id}-{index}", index) for index in range(self.num_sequences)]

    def _engine_request(self, internal_id: str, index: int) -> EngineRequest:
        return EngineRequest(
            request_id=internal_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling if index == 0 else _with_seed(self.sampling, index),
            external_request_id=self.external_id,
            priority=self.priority,
            session_id=self.session_id,
            cache_salt=self.cache_salt,
            lora=self.lora,
            data_parallel_rank=self.data_parallel_rank,
            trace_headers=self.trace_headers,
            mm_features=self.mm_features,
        )


_INT64 = 2**63


def _with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    seed = sampling.seed
    if seed is not None:
        seed = (seed + index + _INT64) % (2 * _INT64) - _INT64
        if seed == -1:  # "no seed" to an engine
            seed = -_INT64
    fields = {name: getattr(sampling, name) for name in SamplingParams.__slots__}
    return SamplingParams(**(fields | {"seed": seed, "prompt_logprobs": None}))


def resolve_lora(
    model: str, name: str, served_names: Sequence[str], capabilities: Capabilities, loras: LoraRegistry
) -> LoraRequest | None:
    """The adapter that ``lora_name`` (``name``) or ``model`` names; None for the model itself.

    vLLM's HTTP API has adapters named in ``model``, its gRPC API in ``lora_name``; here both work, if they do not contradict each other.
    """
    if model and model not in served_names:
        adapter = loras.resolve(model)
        if adapter is None:
            raise UnknownNameError(f"model {model!r} is not served here; served: {', '.join(map(repr, served_names))}")
        if name and name != model:
            raise InvalidRequestError(f"lora_name {name!r}: model names another adapter, {model!r}")
        return adapter
    if not name:
        return None
    if not capabilities.supports_lora:
        raise PreconditionError(f"lora_name {name!r}: the engine was started without LoRA (--enable-lora)")
    adapter = loras.resolve(name)
    if adapter is None:
        raise UnknownNameError(f"lora_name {name!r}: no such adapter is loaded")
    return adapter


def convert(
    request: pb.GenerateRequest,
    prompt_token_ids: list[int],
    metadata: Mapping[str, Any],
    *,
    model: ModelFiles,
    defaults: GenerationDefaults,
    capabilities: Capabilities,
    lora: LoraRequest | None,
    max_logprobs: int,
    structured_outputs_backend: str,
) -> GenerationPlan:
    """The plan of ``request``, whose prompt is ``prompt_token_ids`` (whole, not truncated). Raises RequestError.

    ``defaults`` are the model's sampling defaults, ``max_logprobs`` the server's limit (-1: none). The structured output constraint
    goes into the plan as it is: whoever calls has compiled it.
    """
    options = request.response
    external_id = validation.check_request_id(request.request_id) or _random_id()
    max_model_len = capabilities.max_model_len
    if request.WhichOneof("prompt") == "token_ids":
        validation.check_token_ids("token_ids", prompt_token_ids, model.vocab_size)
    if request.truncate_prompt_tokens:
        kept = validation.check_truncation(request.truncate_prompt_tokens, max_model_len)
        if request.media and kept < len(prompt_token_ids):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must not cut a prompt with media: it has {len(prompt_token_ids)} tokens, got {kept}"
            )
        prompt_token_ids = prompt_token_ids[-kept:]
    left = validation.check_prompt_length(len(prompt_token_ids), max_model_len)
    mm_features = None
    if request.media:
        mm_features = check_media(
            request.media,
            len(prompt_token_ids),
            token_ids_given=request.WhichOneof("prompt") == "token_ids",
            supports_multimodal=capabilities.supports_multimodal,
        )
    num_sequences = request.sampling.num_sequences or 1
    if num_sequences > validation.MAX_SEQUENCES:
        raise InvalidRequestError(f"sampling.num_sequences must be at most {validation.MAX_SEQUENCES}, got {num_sequences}")
    sampling = _sampling(request, model, defaults, left, max_logprobs, structured_outputs_backend)
    return GenerationPlan(
        external_id=external_id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        num_sequences=num_sequences,
        output=OutputOptions(
            text=options.output_text if options.HasField("output_text") else True,
            token_ids=options.output_token_ids,
            logprobs=options.output_logprobs,
            skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
            stop_strings=validation.check_stop_strings(request.stopping.stop_strings),
            include_stop_strings=request.stopping.include_stop_strings,
            min_tokens=sampling.min_tokens,
        ),
        prompt_token_ids_wanted=options.prompt_token_ids,
        prompt_logprobs_wanted=options.prompt_logprobs,
        priority=request.priority,
        session_id=request.session_id or None,
        cache_salt=request.kv.cache_salt or None,
        lora=lora,
        data_parallel_rank=(
            validation.check_data_parallel_rank(metadata[DATA_PARALLEL_RANK]) if DATA_PARALLEL_RANK in metadata else None
        ),
        trace_headers=(
            validation.trace_headers(metadata["traceparent"], metadata.get("tracestate"))
            if "traceparent" in metadata
            else None
        ),
        mm_features=mm_features,
    )


def _sampling(
    request: pb.GenerateRequest,
    model: ModelFiles,
    defaults: GenerationDefaults,
    left: int,
    max_logprobs: int,
    structured_outputs_backend: str,
) -> SamplingParams:
    stopping = request.stopping
    max_tokens, min_tokens = validation.check_new_tokens(
        stopping.max_new_tokens, stopping.min_new_tokens, defaults.max_new_tokens, left
    )
    validation.check_entries("stopping.stop_token_ids", len(stopping.stop_token_ids), model.vocab_size)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=validation.check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, model.vocab_size),
        eos_token_id=model.eos_token_id,
        extra_eos_token_ids=model.extra_eos_token_ids,
        ignore_eos=stopping.ignore_eos,
        skip_reading_prefix_cache=request.kv.bypass_prefix_cache,
    )
    if request.HasField("temperature"):
        sampling.temperature = validation.check_temperature(request.temperature)
    _random(sampling, request.sampling, defaults, model.vocab_size)
    _decoding(sampling, request.decoding, defaults, model.vocab_size)
    if request.decoding.WhichOneof("structured_output") is not None:
        sampling.structured_output = constraint_of(request.decoding, structured_outputs_backend)
    _logprobs(sampling, request.response, model.vocab_size, max_logprobs)
    if request.HasField("kv"):
        sampling.extra_args = _transfer_params(request.kv)
    return sampling


def _random(sampling: SamplingParams, asked: pb.RandomSampling, defaults: GenerationDefaults, vocab_size: int) -> None:
    # A larger top_k than the vocabulary says the same, and engines count in int32.
    sampling.top_k = min(asked.top_k or defaults.top_k or 0, vocab_size)
    if asked.top_p:
        sampling.top_p = validation.check_in_range("sampling.top_p", asked.top_p, 0, 1, above=True)
    elif defaults.top_p is not None:
        sampling.top_p = defaults.top_p
    if asked.min_p:
        sampling.min_p = validation.check_in_range("sampling.min_p", asked.min_p, 0, 1)
    elif defaults.min_p is not None:
        sampling.min_p = defaults.min_p
    if asked.HasField("seed") and asked.seed != -1:
        sampling.seed = asked.seed


def _decoding(sampling: SamplingParams, asked: pb.DecodingParameters, defaults: GenerationDefaults, vocab_size: int) -> None:
    if asked.presence_penalty:
        sampling.presence_penalty = validation.check_in_range("decoding.presence_penalty", asked.presence_penalty, -2, 2)
    elif defaults.presence_penalty is not None:
        sampling.presence_penalty = defaults.presence_penalty
    if asked.frequency_penalty:
        sampling.frequency_penalty = validation.check_in_range("decoding.frequency_penalty", asked.frequency_penalty, -2, 2)
    elif defaults.frequency_penalty is not None:
        sampling.frequency_penalty = defaults.frequency_penalty
    if asked.repetition_penalty:
        sampling.repetition_penalty = validation.check_in_range(
            "decoding.repetition_penalty", asked.repetition_penalty, 0, math.inf, above=True
        )
    elif defaults.repetition_penalty is not None:
        sampling.repetition_penalty = defaults.repetition_penalty
    if asked.logit_bias:
        sampling.logit_bias = validation.check_logit_bias(asked.logit_bias, vocab_size)
    if asked.allowed_token_ids:
        validation.check_entries("decoding.allowed_token_ids", len(asked.allowed_token_ids), vocab_size)
        sampling.allowed_token_ids = validation.check_token_ids(
            "decoding.allowed_token_ids", asked.allowed_token_ids, vocab_size
        )


def _logprobs(sampling: SamplingParams, asked: pb.ResponseOptions, vocab_size: int, max_logprobs: int) -> None:
    """Candidates without the flag beside them are ignored."""
    if asked.output_logprobs:
        sampling.logprobs, sampling.logprob_token_ids = validation.check_candidates(
            "response.output_candidates", asked.output_candidates, vocab_size, max_logprobs
        )
    if asked.prompt_logprobs:
        if asked.prompt_candidates.WhichOneof("select") == "token_ids":
            raise InvalidRequestError("response.prompt_candidates must be top_n or all: token_ids is not supported")
        sampling.prompt_logprobs, _ = validation.check_candidates(
            "response.prompt_candidates", asked.prompt_candidates, vocab_size, max_logprobs
        )


def _transfer_params(kv: pb.KVCacheParameters) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if kv.HasField("kv_transfer_params"):
        extra["kv_transfer_params"] = mapping_of_struct("kv.kv_transfer_params", kv.kv_transfer_params)
    if kv.HasField("ec_transfer_params"):
        extra["ec_transfer_params"] = mapping_of_struct("kv.ec_transfer_params", kv.ec_transfer_params)
    return extra or None
