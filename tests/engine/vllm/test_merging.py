"""Outputs that merge lose no token and change no order, whatever stands between them, also in a client that has fallen behind."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.vllm.scripted import engine_with_core, request
from trio_frontend.engine.base import EngineError, FinishReason
from trio_frontend.engine.vllm import connection
from trio_frontend.engine.vllm.merging import Held, merge, release
from trio_frontend.engine.vllm.wire import Output

PLAIN, LOGPROBS, PROMPT_LOGPROBS, LAST, LAST_WITH_LOGPROBS = range(5)


def output(request_id: str, kind: int, token_ids: list[int]) -> Output:
    made = Output(request_id, list(token_ids))
    if kind in (LOGPROBS, LAST_WITH_LOGPROBS):
        made.new_logprobs = ["logprobs of", *token_ids]
    if kind == PROMPT_LOGPROBS:
        made.new_prompt_logprobs_tensors = ["of the prompt"]
    if kind in (LAST, LAST_WITH_LOGPROBS):
        made.finish_reason = FinishReason.LENGTH
    return made


steps = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(PLAIN, LAST_WITH_LOGPROBS), st.lists(st.integers(0, 9), max_size=3))
    ),
    max_size=8,
)


@given(steps)
def test_merged_outputs_have_the_same_tokens_in_the_same_order(messages: list[list[tuple[str, int, list[int]]]]) -> None:
    held: Held = {}
    delivered: list[Output] = []
    for message in messages:
        delivered += merge(held, [output(*each) for each in message])
    delivered += release(held)
    assert not held
    for name in "abc":
        sent = [token for message in messages for each in message if each[0] == name for token in each[2]]
        assert [token for each in delivered if each.request_id == name for token in each.new_token_ids] == sent


@given(steps)
def test_logprobs_stay_with_their_tokens_alone(messages: list[list[tuple[str, int, list[int]]]]) -> None:
    held: Held = {}
    for message in messages:
        for each in merge(held, [output(*one) for one in message]):
            if each.new_logprobs is not None:
                assert each.new_logprobs == ["logprobs of", *each.new_token_ids]


def test_plain_outputs_of_several_steps_are_one_and_the_last_takes_them_along() -> None:
    held: Held = {}
    assert merge(held, [output("a", PLAIN, [1]), output("b", PLAIN, [7])]) == []
    assert merge(held, [output("a", PLAIN, [2]), output("b", PLAIN, [8])]) == []
    assert merge(held, [output("a", LAST, [3])]) == [output("a", LAST, [1, 2, 3])]
    assert release(held) == [output("b", PLAIN, [7, 8])]


@pytest.fixture
def always_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output is a turn's worth, and after each the reader finds itself behind."""
    monkeypatch.setattr(connection, "TURN", 1)
    monkeypatch.setattr(connection, "BEHIND", -1.0)


async def test_a_reader_that_is_behind_delivers_every_token_and_in_fewer_outputs(always_behind: None) -> None:
    async with engine_with_core() as (engine, core), engine.generate(request(max_tokens=400)) as outputs:
        await core.receive_add()
        for token in range(300):
            core.send(["r", [token]])
        core.finish("r", [300])
        found: list[Any] = []
        with trio.fail_after(5):
            async for batch in outputs:
                found += batch
    assert [token for each in found for token in each.token_ids] == list(range(301))
    assert len(found) < 301
    assert [each.finish_reason for each in found if each.finish_reason is not None] == [FinishReason.LENGTH]


async def test_what_was_held_is_delivered_before_an_engine_that_dies_ends_the_request(always_behind: None) -> None:
    async with engine_with_core() as (engine, core), engine.generate(request(max_tokens=400)) as outputs:
        await core.receive_add()
        for token in range(40):
            core.send(["r", [token]])
        core.send_frames(b"ENGINE_CORE_DEAD")
        with trio.fail_after(5):
            await engine.health.wait_value(lambda health: not health.serving)
        found: list[int] = []
        with pytest.raises(EngineError), trio.fail_after(5):  # noqa: PT012
            async for batch in outputs:
                for each in batch:
                    found += each.token_ids
    assert found == list(range(40))
