"""Protects the engine over a real model, the shipped one: its numbers, their independence of company, structured output."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import trio
from tokenizers import Tokenizer

from tests.engine.embedded.fakes import Collected, a_request, collect, generate
from trio_frontend.engine.base import EngineError, FinishReason, StructuredOutput
from trio_frontend.engine.embedded import SHIPPED_MODEL, EmbeddedEngine, LoadedModel, load_model, open_engine, run_engine
from trio_frontend.engine.embedded.stepper import PREFILL_CHUNK


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))


def full_logprobs(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """Logprobs [n, vocab] after each token, in one call and without a cache that was used before."""
    logits = model.session.run(np.array([token_ids]), model.session.empty_cache(1))[0].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def a_prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng((length, salt)).integers(3, 1000, length).tolist()


def logprob_bytes(got: Collected) -> bytes:
    return b"".join(output.logprobs.logprobs.tobytes() for output in got.outputs if output.logprobs is not None)


@pytest.mark.parametrize("length", [1, 7, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 30])
async def test_greedy_tokens_and_logprobs_are_those_of_the_whole_text_run_at_once(model: LoadedModel, length: int) -> None:
    prompt = a_prompt(length)
    async with run_engine(model) as engine:
        got = await generate(engine, a_request("a", prompt, max_tokens=20, logprobs=3, prompt_logprobs=2))
    reference = full_logprobs(model, prompt + got.token_ids)
    after_prompt = reference[length - 1 : -1]
    assert got.token_ids == after_prompt.argmax(axis=1).tolist()
    for row, output in zip(after_prompt, got.outputs, strict=True):
        assert output.logprobs is not None
        np.testing.assert_allclose(output.logprobs.logprobs[0], row[output.logprobs.token_ids[0]], atol=1e-3)
        assert output.logprobs.token_ids[0, 1:].tolist() == np.argsort(-row, kind="stable")[:3].tolist()
        assert output.logprobs.ranks.tolist() == [1]
    prompt_lists = got.outputs[0].prompt_logprobs
    assert prompt_lists is not None
    assert prompt_lists.token_ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(
        prompt_lists.logprobs, np.take_along_axis(reference[: length - 1], prompt_lists.token_ids.astype(int), 1), atol=1e-3
    )


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 7}, {"temperature": 0.8, "top_p": 0.9, "seed": -5}]
)
async def test_a_request_gives_bit_for_bit_the_same_whatever_else_runs(model: LoadedModel, params: dict[str, Any]) -> None:
    prompt = a_prompt(9)
    request = a_request("mine", prompt, max_tokens=60, logprobs=0, ignore_eos=True, **params)

    async def company(engine: EmbeddedEngine, number: int) -> None:
        # Equal, shorter and longer prompts than ours, and lives that begin and end while it runs.
        length = [9, 9, 3, 30, 2 * PREFILL_CHUNK][number % 5]
        for turn in range(2):
            other = a_request(
                f"{number}/{turn}",
                a_prompt(length, number),
                max_tokens=5 + 4 * (number % 6),
                temperature=1.0,
                ignore_eos=True,
            )
            await generate(engine, other)

    async with run_engine(model) as engine:
        alone = await generate(engine, request)
        await engine.call_utility("pause_scheduler", "keep")
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(company, engine, number)
            async with engine.generate(request) as stream:
                await engine.call_utility("resume_scheduler")
                together = await collect(stream)
    assert together.token_ids == alone.token_ids
    assert logprob_bytes(together) == logprob_bytes(alone)


async def test_different_seeds_give_different_texts(model: LoadedModel) -> None:
    async with run_engine(model) as engine:
        texts = set()
        for seed in (0, 1, -3, 2**40):
            got = await generate(engine, a_request("a", [0], max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True))
            texts.add(tuple(got.token_ids))
    assert len(texts) == 4


async def test_sixty_four_at_once_get_what_each_would_get_alone() -> None:
    requests = [
        a_request(str(i), a_prompt(1 + i % 7, i), max_tokens=8 + i % 5, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(64)
    ]
    results: dict[int, list[int]] = {}

    async def one(engine: EmbeddedEngine, number: int) -> None:
        results[number] = (await generate(engine, requests[number])).token_ids

    async with open_engine(None) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(one, engine, number)
        assert (engine.live_requests, engine.cached_sequences) == (0, 0)
        for number in range(0, 64, 5):
            assert (await generate(engine, requests[number])).token_ids == results[number]


@pytest.fixture
def eos(model: LoadedModel) -> int:
    return model.eos_token_ids[0]


def matching_json(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and value["name"] in ("Tom", "Anna") and isinstance(value["age"], int)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Anna"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURED: list[tuple[StructuredOutput, Any]] = [
    (StructuredOutput("regex", r"[a-z]{3,8} [0-9]{2}!"), lambda text: re.fullmatch(r"[a-z]{3,8} [0-9]{2}!", text)),
    (
        StructuredOutput("choice", ("yes", "no", 'quo"ted', "größer 😀")),
        lambda text: text in ("yes", "no", 'quo"ted', "größer 😀"),
    ),
    (StructuredOutput("json", json.dumps(SCHEMA)), matching_json),
    (StructuredOutput("grammar", 'root ::= "a" root | "b"'), lambda text: re.fullmatch("a*b", text)),
    (StructuredOutput("grammar", 'start: "x" /[0-9]/ "y"'), lambda text: re.fullmatch("x[0-9]y", text)),
]


@pytest.mark.parametrize(("constraint", "matches"), STRUCTURED, ids=lambda value: getattr(value, "kind", ""))
@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 11}, {"ignore_eos": True}, {"min_tokens": 200}])
async def test_structured_output_matches_its_constraint_and_ends_with_eos(
    model: LoadedModel, tokenizer: Tokenizer, eos: int, constraint: StructuredOutput, matches: Any, params: dict[str, Any]
) -> None:
    # The bias ends what the constraint would let go on for ever, like a*.
    b = tokenizer.encode("b", add_special_tokens=False).ids[0]
    request = a_request(
        "a", [0], max_tokens=250, structured_output=constraint, eos_token_id=eos, logit_bias={b: 5.0}, **params
    )
    async with run_engine(model) as engine:
        got = await generate(engine, request)
    assert (got.finish_reason, got.stop_reason, got.token_ids[-1]) == (FinishReason.STOP, None, eos)
    text = tokenizer.decode(got.token_ids[:-1], skip_special_tokens=False)
    assert matches(text), text


async def test_a_json_object_begins_as_one_however_far_it_gets(model: LoadedModel, tokenizer: Tokenizer, eos: int) -> None:
    constraint = StructuredOutput("json_object", None)
    async with run_engine(model) as engine:
        got = await generate(engine, a_request("a", [0], max_tokens=40, structured_output=constraint, eos_token_id=eos))
    text = tokenizer.decode(got.token_ids, skip_special_tokens=True)
    assert text.lstrip().startswith("{")
    if got.finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(text), dict)


async def test_logprobs_under_a_constraint_are_of_what_it_allows(model: LoadedModel, eos: int) -> None:
    constraint = StructuredOutput("choice", ("yes",))
    async with run_engine(model) as engine:
        request = a_request("a", [0], max_tokens=20, structured_output=constraint, eos_token_id=eos, logprobs=0)
        got = await generate(engine, request)
    last = got.outputs[-1].logprobs
    assert last is not None
    assert (last.token_ids.tolist(), last.logprobs.tolist(), last.ranks.tolist()) == ([[eos]], [[0.0]], [1])


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (StructuredOutput("regex", "[a-z"), "regex cannot be compiled"),
        (StructuredOutput("json", '{"type": "obj'), "json must be JSON"),
        (StructuredOutput("json", '{"type": "no such type"}'), "json cannot be compiled"),
        (StructuredOutput("grammar", "root ::= nothing"), "grammar"),
        (StructuredOutput("choice", ()), "at least one"),
        (StructuredOutput("structural_tag", '{"type": "structural_tag", "format": {}}'), "structural_tag"),
        (StructuredOutput("structural_tag", '{"structures": [], "triggers": []}'), "no structures"),
    ],
)
async def test_a_constraint_that_cannot_be_compiled_is_refused_before_the_request_starts(
    model: LoadedModel, constraint: StructuredOutput, message: str
) -> None:
    async with run_engine(model) as engine:
        with pytest.raises(EngineError, match=message) as caught:
            async with engine.generate(a_request("a", structured_output=constraint)):
                raise AssertionError("it started")
        assert caught.value.code == "validation_error"
        assert engine.live_requests == 0
        assert engine.health.value.serving


async def test_a_structural_tag_constrains_what_follows_its_trigger(
    model: LoadedModel, tokenizer: Tokenizer, eos: int
) -> None:
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}]}
    constraint = StructuredOutput("structural_tag", json.dumps(tag))
    # Biased so that the free text soon has the trigger.
    first, second = tokenizer.encode("<f", add_special_tokens=False).ids
    params: dict[str, Any] = {"logit_bias": {first: 60.0, second: 59.0}, "frequency_penalty": 2.0}
    async with run_engine(model) as engine:
        request = a_request("a", [0], max_tokens=30, structured_output=constraint, eos_token_id=eos, **params)
        got = await generate(engine, request)
    text = tokenizer.decode(got.token_ids, skip_special_tokens=False)
    assert re.search(r"<f>(true|false)</f>", text), text
