"""An EngineRequest as the ADD message of a vLLM engine core. Pure functions; the one place where a request becomes bytes.

An engine core trusts its frontend: an ADD that it cannot decode, or that breaks the checks of its SamplingParams, ends its input
thread, and it answers nothing ever after. So whatever comes here has been checked before, and is checked once more: a ValueError
naming the field and the value, never a message that an engine would choke on. The ranges are those of
``vllm.SamplingParams._verify_args`` and ``vllm.LoRARequest``; types are those of the msgspec definitions in 0.32 and 0.33.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from trio_frontend.engine.base import EngineInfo, EngineRequest, LoraRequest, SamplingParams, StructuredOutput
from trio_frontend.engine.vllm import wire

__all__ = ["encode_add"]

DELTA: Final = 1
"""``RequestOutputKind.DELTA``: each output has only what is new."""

MAX_LOGPROB_TOKEN_IDS: Final = 128
"""``vllm.sampling_params.MAX_LOGPROB_TOKEN_IDS``."""

MAX_DEPTH: Final = 64
"""Nesting of maps and arrays in free-form values; msgspec itself gives up at Python's recursion limit."""

TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class _Ids(msgspec.Struct, array_like=True, gc=False):
    """What msgspec knows of a Struct it keeps; of a list[...] it finds it out with every call, at ten times a short list's price."""

    ids: TokenIds


INT64: Final = range(-(2**63), 2**63)
BACKENDS: Final = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")


def encode_add(request: EngineRequest, engine: EngineInfo, *, client_index: int, arrival_time: float) -> bytes:
    """The body of ADD: ``EngineCoreRequest`` as an array. ValueError if ``engine`` could not take it.

    ``client_index``: on which of the engine's outputs the answers come; ``arrival_time``: seconds since the epoch.
    """
    prompt = _token_ids("prompt_token_ids", request.prompt_token_ids)
    if len(prompt) >= engine.max_model_len:  # an engine dies of it
        raise ValueError(f"the prompt has {len(prompt)} tokens and leaves no room for one more in {engine.max_model_len}")
    if request.lora is not None and not engine.supports_lora:
        raise ValueError(f"lora is {request.lora.name!r}, and the engine has no LoRA")
    body = [
        _string("request_id", request.request_id),
        prompt,
        list(request.mm_features) if request.mm_features else None,
        _sampling_params(request.sampling),
        None,  # pooling_params
        arrival_time,
        _lora(request.lora),
        _string("cache_salt", request.cache_salt) if request.cache_salt is not None else None,
        _integer("data_parallel_rank", request.data_parallel_rank, 0, 2**16 - 1)
        if request.data_parallel_rank is not None
        else None,
        None,  # prompt_embeds
        None,  # prompt_is_token_ids
        client_index,
        0,  # current_wave
        _integer("priority", request.priority, INT64.start, INT64.stop - 1),
        _trace_headers(request.trace_headers),
        False,  # resumable
        str(request.external_request_id) if request.external_request_id else None,
        None,  # reasoning_ended
        None,  # reasoning_parser_kwargs
        False,  # abort_immediately
        str(request.session_id) if request.session_id else None,
    ]
    try:
        return wire.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"the request cannot be sent to an engine: {error}") from error


def _sampling_params(p: SamplingParams) -> dict[str, Any]:
    """``SamplingParams`` as a map that leaves out what is at its default there."""
    max_tokens = _integer("max_tokens", p.max_tokens, 1, 2**31 - 1)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": _number("temperature", p.temperature, 0.0, 2.0),
        "detokenize": False,
        "output_kind": DELTA,
    }
    if p.min_tokens != 0:
        fields["min_tokens"] = _integer("min_tokens", p.min_tokens, 0, max_tokens)
    if p.top_k != 0:
        fields["top_k"] = _integer("top_k", p.top_k, -1, 2**31 - 1)
    if p.top_p != 1.0:
        fields["top_p"] = _number("top_p", p.top_p, 0.0, 1.0, exclusive=True)
    if p.min_p != 0.0:
        fields["min_p"] = _number("min_p", p.min_p, 0.0, 1.0)
    if p.seed is not None:
        fields["seed"] = _integer("seed", p.seed, INT64.start, INT64.stop - 1)
    if p.presence_penalty != 0.0:
        fields["presence_penalty"] = _number("presence_penalty", p.presence_penalty, -2.0, 2.0)
    if p.frequency_penalty != 0.0:
        fields["frequency_penalty"] = _number("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    if p.repetition_penalty != 1.0:
        fields["repetition_penalty"] = _number("repetition_penalty", p.repetition_penalty, 0.0, math.inf, exclusive=True)
    if p.logit_bias:
        fields["logit_bias"] = _logit_bias(p.logit_bias)
    if p.allowed_token_ids is not None:
        fields["allowed_token_ids"] = _token_ids("allowed_token_ids", p.allowed_token_ids)
    _add_stops(fields, p)
    if p.logprobs is not None:
        fields["logprobs"] = _integer("logprobs", p.logprobs, -1, 2**31 - 1)
    if p.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _integer("prompt_logprobs", p.prompt_logprobs, -1, 2**31 - 1)
    if p.logprob_token_ids is not None:
        fields["logprob_token_ids"] = _logprob_token_ids(p.logprob_token_ids, p.logprobs)
    if p.structured_output is not None:
        fields["structured_outputs"] = _structured_output(p.structured_output)
    if p.skip_reading_prefix_cache:
        # Left out, the engine decides: it skips reading where prompt logprobs are asked for.
        fields["skip_reading_prefix_cache"] = True
    if p.extra_args:
        fields["extra_args"] = _extra_args(p.extra_args)
    return fields


def _add_stops(fields: dict[str, Any], p: SamplingParams) -> None:
    """The three fields of the tokens that end a request (``SamplingParams.update_from_generation_config``)."""
    eos = _integer("eos_token_id", p.eos_token_id, 0, 2**31 - 1) if p.eos_token_id is not None else None
    if p.ignore_eos:
        fields["ignore_eos"] = True
    elif eos is not None:
        fields["_eos_token_id"] = eos
    if not p.stop_token_ids and not p.extra_eos_token_ids:
        if eos is not None:
            fields["_all_stop_token_ids"] = [eos]
        return
    stop_token_ids = _token_ids("stop_token_ids", p.stop_token_ids, empty=True)
    extra_eos = _token_ids("extra_eos_token_ids", p.extra_eos_token_ids, empty=True)
    # min_tokens and structured output look at all of them, EOS of an ignore_eos request included; only stop_token_ids and
    # _eos_token_id end a request.
    all_stops = list(dict.fromkeys((*stop_token_ids, *([eos] if eos is not None else ()), *extra_eos)))
    if not p.ignore_eos:
        stop_token_ids = list(dict.fromkeys((*stop_token_ids, *(t for t in extra_eos if t != eos))))
    if stop_token_ids:
        fields["stop_token_ids"] = stop_token_ids
    if all_stops:
        fields["_all_stop_token_ids"] = all_stops


def _structured_output(constraint: StructuredOutput) -> dict[str, Any]:
    """``StructuredOutputsParams``; ``_backend`` is what a vLLM frontend sets after its own checks, and an engine needs it."""
    kind, value, backend = constraint.kind, constraint.value, constraint.backend
    if backend not in BACKENDS:
        raise ValueError(f"structured_output: {backend!r} is no backend of vLLM ({', '.join(BACKENDS)})")
    if kind == "json_object":
        return {"json_object": True, "_backend": backend}
    if kind == "choice":
        if isinstance(value, str) or not value:
            raise ValueError("structured_output: choice needs at least one string")
        choices = [choice for choice in value if isinstance(choice, str)]
        if len(choices) < len(value):
            raise ValueError("structured_output: every choice must be a string")
        if backend == "xgrammar":
            # 0.32's xgrammar backend has no choice, 0.33's has: a grammar works in both.
            return {"grammar": _choice_grammar(choices), "_backend": backend}
        return {"choice": choices, "_backend": backend}
    if kind not in ("json", "regex", "grammar", "structural_tag"):
        raise ValueError(f"structured_output: there is no kind {kind!r}")
    if not isinstance(value, str) or not (value.strip() or kind == "regex"):
        raise ValueError(f"structured_output: {kind} is {value!r}, it must be a string that is not blank")
    if kind == "regex" and "\0" in value:
        raise ValueError("structured_output: a regex must not contain NUL")
    return {kind: value, "_backend": backend}


def _choice_grammar(choices: Iterable[str]) -> str:
    """Any one of ``choices``, as EBNF for xgrammar."""
    return "root ::= " + " | ".join(f'"{"".join(map(_ebnf_character, choice))}"' for choice in choices)


def _ebnf_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\u{ord(character):04x}"
    return character


def _lora(lora: LoraRequest | None) -> list[Any] | None:
    if lora is None:
        return None
    return [_string("lora.name", lora.name), _integer("lora.id", lora.id, 1, 2**31 - 1), _string("lora.path", lora.path)]


def _logprob_token_ids(wanted: Iterable[int], logprobs: int | None) -> list[int]:
    ids = _token_ids("logprob_token_ids", wanted)
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise ValueError(f"logprob_token_ids has {len(ids)} entries, at most {MAX_LOGPROB_TOKEN_IDS} are allowed")
    if logprobs is not None and logprobs != len(ids):
        raise ValueError(f"logprobs is {logprobs} beside {len(ids)} logprob_token_ids: it must be unset or their number")
    return ids


def _logit_bias(bias: Mapping[int, float]) -> dict[int, float]:
    return {
        _integer("logit_bias token", token, 0, 2**31 - 1): _number("logit_bias", value, -100.0, 100.0)
        for token, value in bias.items()
    }


def _token_ids(name: str, ids: Iterable[int], *, empty: bool = False) -> list[int]:
    """As a list of ints that fit int32, as an engine's tensors do; checked at C speed, a prompt may be long."""
    if not isinstance(ids, list | tuple):
        ids = ids.tolist() if isinstance(ids, np.ndarray | array.array) else list(ids)
    if not ids:
        if empty:
            return []
        raise ValueError(f"{name} is empty")
    try:
        return msgspec.convert((ids,), _Ids).ids
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {str(error).replace('$[0]', '$', 1)}") from None


def _trace_headers(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    if not headers:
        return None
    return {_string("trace header", name): str(value) for name, value in headers.items()}


def _extra_args(args: Mapping[str, Any]) -> dict[str, Any]:
    _check_plain("extra_args", args, MAX_DEPTH)
    return dict(args)


def _check_plain(name: str, value: Any, depth: int) -> None:
    """Only what MessagePack has, and what an engine's decoder takes without a schema."""
    if depth == 0:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} has the integer {value}, which has more than 64 bits")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}, which is not a string")
            _check_plain(name, item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(name, item, depth - 1)
    elif value is not None and not isinstance(value, str | float | bytes):
        raise ValueError(f"{name} has a {type(value).__name__}, which MessagePack has not")


def _integer(name: str, value: int, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, it must be an integer from {low} to {high}")
    return value


def _number(name: str, value: float, low: float, high: float, *, exclusive: bool = False) -> float:
    """In [low, high], or (low, high] if ``exclusive``; finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, it must be a number") from None
    if not math.isfinite(number) or not low <= number <= high or (exclusive and number == low):
        raise ValueError(f"{name} is {value!r}, it must be in {'(' if exclusive else '['}{low}, {high}]")
    return number


def _string(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, it must be a string that is not empty")
    return value
