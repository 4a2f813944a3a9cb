"""An output as it is on the wire, as one of :mod:`trio_frontend.engine.base`. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trio_frontend.engine.base import EngineError, EngineOutput, FinishReason
from trio_frontend.engine.vllm import wire

__all__ = ["FINISH_REASONS", "engine_error", "engine_output"]

FINISH_REASONS: Final[Mapping[int | None, FinishReason]] = {reason.value: reason for reason in FinishReason}
"""By their number on the wire. A number that is not here is of a later release."""


def engine_output(output: wire.Output, frames: Sequence[wire.Frame], reason: FinishReason | None) -> EngineOutput:
    """With its arrays, which may be in ``frames``. WireError if they contradict the rest."""
    logprobs = prompt_logprobs = None
    if output.new_logprobs is not None:
        logprobs = wire.logprobs_of(output.new_logprobs, frames)
        if len(logprobs.ranks) < len(output.new_token_ids):
            raise wire.WireError(f"logprobs for {len(logprobs.ranks)} of {len(output.new_token_ids)} tokens")
    if output.new_prompt_logprobs_tensors is not None:
        prompt_logprobs = wire.logprobs_of(output.new_prompt_logprobs_tensors, frames)
    return EngineOutput(
        output.new_token_ids,
        logprobs,
        prompt_logprobs,
        reason,
        output.stop_reason,
        output.kv_transfer_params,
        output.ec_transfer_params,
    )


def engine_error(output: wire.Output) -> EngineError:
    """Why a request ended with ERROR, or with a reason that is not known here."""
    if output.error is not None:
        stated = output.error
        message = stated.message or stated.code or "engine failed during generation"
        return EngineError(message, code=stated.code, retryable=stated.retryable)
    if output.mm_cache_miss_hashes:
        message = "the engine's media cache lost an item; send the request again"
        return EngineError(message, code="mm_cache_miss", retryable=True)
    if output.finish_reason != FinishReason.ERROR:
        return EngineError(f"the engine ended the request for a reason unknown here: {output.finish_reason}")
    return EngineError()
