"""Protects the sampling rules as a whole: tokens, ends, logprobs and ranks are those that a real vLLM engine gave (recorded)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.engine.embedded.fakes import a_request, generate
from trio_frontend.engine.base import FinishReason, LogprobsLists, StructuredOutput
from trio_frontend.engine.embedded import SHIPPED_MODEL, EmbeddedEngine, load_model, run_engine

RECORD = Path(__file__).parents[1] / "data" / "vllm_sampling.json"
TOLERANCE = 1e-3
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def test_the_record_is_of_the_weights_that_are_shipped(record: dict[str, Any]) -> None:
    assert record["model_sha256"] == hashlib.sha256((SHIPPED_MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert len(record["cases"]) >= 40


def sampling_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """vLLM's parameters as ours."""
    ours = dict(parameters)
    if "regex" in ours:
        ours["structured_output"] = StructuredOutput("regex", ours.pop("regex"))
    if "choice" in ours:
        ours["structured_output"] = StructuredOutput("choice", tuple(ours.pop("choice")))
    if "logit_bias" in ours:
        ours["logit_bias"] = {int(token_id): bias for token_id, bias in ours["logit_bias"].items()}
    return ours


def assert_logprobs(lists: LogprobsLists, rows: list[list[Any]]) -> None:
    assert len(lists.ranks) == len(rows)
    for row, (rank, logprob, candidates) in enumerate(rows):
        assert lists.ranks[row] == rank
        assert lists.logprobs[row, 0] == pytest.approx(logprob, abs=TOLERANCE)
        got = dict(zip(lists.token_ids[row].tolist(), lists.logprobs[row].tolist(), strict=True))
        got = {token_id: value for token_id, value in got.items() if value > -1e30}
        assert got == pytest.approx({int(token_id): value for token_id, value in candidates.items()}, abs=TOLERANCE)


async def test_every_sampling_rule_gives_what_vllm_gives(record: dict[str, Any]) -> None:
    model = load_model(SHIPPED_MODEL)

    async def one(engine: EmbeddedEngine, number: int, case: dict[str, Any]) -> None:
        request = a_request(
            str(number),
            case["prompt_token_ids"],
            max_tokens=record["new_tokens"],
            logprobs=2,
            prompt_logprobs=1,
            eos_token_id=model.eos_token_ids[0],
            **sampling_of(case["parameters"]),
        )
        got = await generate(engine, request)
        assert got.token_ids == case["token_ids"], case["parameters"]
        assert (got.finish_reason, got.stop_reason) == (FINISH_REASONS[case["finish_reason"]], case["stop_reason"])
        for output, row in zip(got.outputs, case["logprobs"], strict=True):
            assert output.logprobs is not None
            assert_logprobs(output.logprobs, [row])
        assert got.outputs[0].prompt_logprobs is not None
        assert_logprobs(got.outputs[0].prompt_logprobs, case["prompt_logprobs"])

    async with run_engine(model) as engine, trio.open_nursery() as nursery:
        for number, case in enumerate(record["cases"]):
            nursery.start_soon(one, engine, number, case)
