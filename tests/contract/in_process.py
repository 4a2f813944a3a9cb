"""The scripts of the contract's cases, played by a ScriptedEngine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.contract.script import FINISH, steps_of
from tests.services.inference_rig import VOCAB_SIZE
from trio_frontend.engine.base import EngineError, EngineOutput, EngineRequest, FinishReason, LogprobsLists, SamplingParams

__all__ = ["play"]


def play(request: EngineRequest) -> Iterator[EngineOutput | EngineError]:
    for step in steps_of(len(request.prompt_token_ids), _as_map(request.sampling), VOCAB_SIZE):
        finish = FINISH[step["finish"]] if "finish" in step else None
        if finish == FINISH["error"]:
            yield EngineError()
            return
        yield EngineOutput(
            step.get("ids", []),
            _logprobs(step.get("logprobs")),
            _logprobs(step.get("prompt_logprobs")),
            None if finish is None else FinishReason(finish),
            step.get("stop_reason"),
            step.get("kv"),
            step.get("ec"),
        )


def _as_map(sampling: SamplingParams) -> dict[str, Any]:
    """As vLLM's own SamplingParams name it."""
    return {
        **{name: getattr(sampling, name) for name in SamplingParams.__slots__},
        "stop_token_ids": [*sampling.stop_token_ids, *(() if sampling.ignore_eos else sampling.extra_eos_token_ids)],
        "_eos_token_id": None if sampling.ignore_eos else sampling.eos_token_id,
    }


def _logprobs(rows: list[Any] | None) -> LogprobsLists | None:
    if rows is None:
        return None
    width = len(rows[0][0]) if rows else 1
    return LogprobsLists(
        np.array([ids for ids, _, _ in rows], np.int32).reshape(-1, width),
        np.array([values for _, values, _ in rows], np.float32).reshape(-1, width),
        np.array([rank for _, _, rank in rows], np.int32),
    )
