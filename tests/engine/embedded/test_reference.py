"""Protects the shipped model's numbers: greedy tokens and logprobs are those of transformers, recorded and, where installed, live."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.engine.embedded.fakes import a_request, generate
from trio_frontend.engine.embedded import SHIPPED_MODEL, EmbeddedEngine, load_model, run_engine

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "tests" / "engine" / "data" / "reference.json"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def test_the_record_is_of_the_weights_that_are_shipped(record: dict[str, Any]) -> None:
    assert record["model_sha256"] == hashlib.sha256((SHIPPED_MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert len(record["cases"]) >= 50


async def assert_engine_agrees(cases: list[dict[str, Any]], new_tokens: int) -> None:
    model = load_model(SHIPPED_MODEL)

    async def one(engine: EmbeddedEngine, number: int, case: dict[str, Any]) -> None:
        eos = model.eos_token_ids[0]
        request = a_request(str(number), case["prompt_token_ids"], max_tokens=new_tokens, logprobs=0, eos_token_id=eos)
        got = await generate(engine, request)
        assert got.token_ids == case["token_ids"], case["prompt_token_ids"]
        logprobs = [float(output.logprobs.logprobs[0, 0]) for output in got.outputs if output.logprobs is not None]
        np.testing.assert_allclose(logprobs, case["logprobs"], atol=TOLERANCE, rtol=0)

    async with run_engine(model) as engine, trio.open_nursery() as nursery:
        for number, case in enumerate(cases):
            nursery.start_soon(one, engine, number, case)


async def test_the_engine_agrees_with_the_recorded_reference(record: dict[str, Any]) -> None:
    await assert_engine_agrees(record["cases"], record["new_tokens"])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="the reference (torch and transformers) is not installed",
)
async def test_the_engine_agrees_with_the_reference_run_now(record: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("record_reference", ROOT / "tools" / "record_reference.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    prompts = [case["prompt_token_ids"] for case in record["cases"]]
    answers = tool.reference(SHIPPED_MODEL, prompts, record["new_tokens"])
    cases = [{"prompt_token_ids": ids, **answer} for ids, answer in zip(prompts, answers, strict=True)]
    await assert_engine_agrees(cases, record["new_tokens"])
