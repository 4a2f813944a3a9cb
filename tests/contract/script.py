"""What the engine answers in the contract's cases: a script that travels in the request, or else an answer made of its parameters.

A script is ``kv_transfer_params["steps"]``, a list of maps, one for each engine step: ``ids``; ``logprobs`` and ``prompt_logprobs`` as
rows of [ids, values, rank]; ``finish`` (stop, length, abort, error, repetition) with ``stop_reason``; ``kv`` and ``ec``. So the same case
runs against a scripted engine in this process, and against any server over ``scripted_core``, which knows nothing of this project.
Plain Python and no imports beyond it: both sides use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["FINISH", "steps_of"]

FINISH = {"stop": 0, "length": 1, "abort": 2, "error": 3, "repetition": 4}
CYCLE = [300, 301, 302, 303, 304, 305, 306, 307]
"""What is generated if nothing else is said: plain words in the tests' tokenizer."""
MANY = 1.0


def steps_of(prompt_length: int, params: Mapping[str, Any], vocab_size: int) -> Iterator[dict[str, Any]]:
    """The steps of a request. ``params`` are vLLM's SamplingParams as a map, with defaults left out."""
    script = (params.get("extra_args") or {}).get("kv_transfer_params", {}).get("steps")
    if script is not None:
        yield from script
        return
    yield from _answer(prompt_length, params, vocab_size)


def _answer(prompt_length: int, params: Mapping[str, Any], vocab_size: int) -> Iterator[dict[str, Any]]:
    """Token after token: the biased one, or those allowed, or a cycle that begins where the seed says; ends as vLLM's scheduler does."""
    bias = params.get("logit_bias") or {}
    pool: Sequence[int] = (
        [token for token, value in bias.items() if value > MANY] or params.get("allowed_token_ids") or CYCLE
    )
    begin = (params.get("seed") or 0) if params.get("temperature") else 0
    stop_ids, eos = params.get("stop_token_ids") or (), params.get("_eos_token_id")
    for position in range(params["max_tokens"]):
        token = pool[(begin + position) % len(pool)]
        step: dict[str, Any] = {"ids": [token]}
        candidates = _candidates(params.get("logprobs"), params.get("logprob_token_ids"), vocab_size)
        if candidates is not None:
            step["logprobs"] = [_row(token, candidates, position)]
        if position == 0 and params.get("prompt_logprobs") is not None:
            likeliest = _candidates(params["prompt_logprobs"], None, vocab_size) or []
            step["prompt_logprobs"] = [_row(CYCLE[0], likeliest, index) for index in range(prompt_length - 1)]
        if position + 1 > params.get("min_tokens", 0):
            if token == eos:
                step["finish"] = "stop"
            elif token in stop_ids:
                step["finish"], step["stop_reason"] = "stop", token
        if position + 1 == params["max_tokens"] and "finish" not in step:
            step["finish"] = "length"
        yield step
        if "finish" in step:
            return


def _candidates(likeliest: int | None, named: Sequence[int] | None, vocab_size: int) -> list[int] | None:
    if named is not None:
        return list(named)
    if likeliest is None:
        return None
    return list(range(vocab_size if likeliest == -1 else likeliest))


def _row(token: int, candidates: list[int], position: int) -> list[Any]:
    values = [-1.0 - position, *[-2.0 - rank for rank in range(len(candidates))]]
    return [[token, *candidates], values, position + 1]
