"""Protects the embedded engine's scheduling, with a model in plain Python: fairness, joining, cancelling, ending, failing.

Most tests hold the model back with a gate and let it go one step at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.engine.embedded.fakes import (
    VOCAB,
    HistorySession,
    a_request,
    collect,
    fake_model,
    generate,
    greedy_tokens,
    logits_after,
)
from trio_frontend.engine.base import (
    DataParallelRankError,
    EngineError,
    EngineOutput,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    StructuredOutput,
    UnsupportedCallError,
    UtilityCallError,
)
from trio_frontend.engine.embedded import EmbeddedEngine, run_engine
from trio_frontend.engine.embedded.stepper import PREFILL_CHUNK, PREFILL_TOKENS
from trio_frontend.engine.outputs import RequestOutputs


async def until(condition: Callable[[], bool]) -> None:
    """Wait, a turn of the loop at a time, for what a worker thread brings about."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread, which knows no event
            await trio.sleep(0.0005)


class Gated:
    """An engine whose model runs one call for each release of the gate."""

    def __init__(self, engine: EmbeddedEngine, session: HistorySession) -> None:
        self.engine = engine
        self.session = session
        self.gate = threading.Semaphore(0)
        session.gate = self.gate

    async def calls(self, count: int) -> None:
        """Let ``count`` calls happen."""
        target = len(self.session.calls) + count
        self.gate.release(count)
        await until(lambda: len(self.session.calls) >= target)


@asynccontextmanager
async def gated_engine(**options: Any) -> AsyncIterator[Gated]:
    session = HistorySession()
    async with run_engine(fake_model(session, options.pop("max_batch_rows", 16)), **options) as engine:
        gated = Gated(engine, session)
        try:
            yield gated
        finally:
            session.gate = None
            gated.gate.release(1000)


class Consumer:
    """A task that takes a request's tokens as they come."""

    def __init__(self, engine: EmbeddedEngine, request_id: str, **kwargs: Any) -> None:
        self.engine = engine
        self.request = a_request(request_id, **kwargs)
        self.token_ids: list[int] = []
        self.outputs: list[EngineOutput] = []
        self.error: EngineError | None = None
        self.started = trio.Event()
        self.left = trio.Event()
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            try:
                async with self.engine.generate(self.request) as stream:
                    self.started.set()
                    async for batch in stream:
                        self.outputs += batch
                        self.token_ids += [token_id for output in batch for token_id in output.token_ids]
            except EngineError as error:
                self.error = error
        self.left.set()

    async def has(self, count: int) -> None:
        await until(lambda: len(self.token_ids) >= count)


async def test_tokens_are_what_the_model_says_after_the_prompt() -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        got = await generate(engine, a_request("a", [5, 6, 7], max_tokens=12))
        assert got.token_ids == greedy_tokens([5, 6, 7], 12)
        assert got.finish_reason is FinishReason.LENGTH
        assert engine.live_requests == 0
        assert engine.cached_sequences == 0
    assert session.calls == [(1, 3, 0), *((1, 1, past) for past in range(3, 14))]


@pytest.mark.parametrize("max_batch_rows", [1, 16])
async def test_many_at_once_each_get_their_own_tokens_and_no_more_than_the_limit_hold_a_cache(max_batch_rows: int) -> None:
    session = HistorySession()
    results: dict[int, list[int]] = {}
    most = 0

    async def one(engine: EmbeddedEngine, number: int) -> None:
        nonlocal most
        prompt = [number % VOCAB, 3, *range(number % 5)]
        got = await generate(engine, a_request(str(number), prompt, max_tokens=4 + number % 9))
        most = max(most, engine.cached_sequences)
        assert got.token_ids == greedy_tokens(prompt, 4 + number % 9)
        results[number] = got.token_ids

    async with run_engine(fake_model(session, max_batch_rows), max_live_sequences=20) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(one, engine, number)
        assert engine.cached_sequences == 0
        assert engine.live_requests == 0
    assert len(results) == 64
    assert 1 < most <= 20
    assert (
        max(rows for rows, _, _ in session.calls) == 1
        if max_batch_rows == 1
        else 1 < max(r for r, _, _ in session.calls) <= 16
    )


async def test_sequences_of_equal_length_share_a_call_and_leave_it_one_by_one() -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        await engine.call_utility("pause_scheduler", "keep")
        async with trio.open_nursery() as nursery:
            consumers = [Consumer(engine, str(i), prompt=[i, 1], max_tokens=3 + i) for i in range(4)]
            for consumer in consumers:
                nursery.start_soon(consumer.run)
            await until(lambda: engine.live_requests == 4)
            await engine.call_utility("resume_scheduler")
    assert session.calls == [*[(1, 2, 0)] * 4, (4, 1, 2), (4, 1, 3), (3, 1, 4), (2, 1, 5), (1, 1, 6)]
    for number, consumer in enumerate(consumers):
        assert consumer.token_ids == greedy_tokens([number, 1], 3 + number)


async def test_all_live_requests_advance_together_and_a_new_one_joins_between_two_steps(nursery: trio.Nursery) -> None:
    async with gated_engine() as gated:
        first = Consumer(gated.engine, "first", prompt=[1], max_tokens=50)
        second = Consumer(gated.engine, "second", prompt=[1, 2, 3], max_tokens=50)
        nursery.start_soon(first.run)
        await first.started.wait()
        await gated.calls(4)
        await first.has(3)
        nursery.start_soon(second.run)
        await second.started.wait()
        await gated.calls(1)  # the step that had begun before
        await first.has(5)
        for count in range(1, 6):
            await gated.calls(2)
            await second.has(count)
            await first.has(5 + count)
            assert (len(first.token_ids), len(second.token_ids)) == (5 + count, count)
        first.scope.cancel()
        second.scope.cancel()


async def test_a_long_prompt_is_computed_in_chunks_between_which_others_decode(nursery: trio.Nursery) -> None:
    async with gated_engine() as gated:
        short = Consumer(gated.engine, "short", prompt=[1], max_tokens=60)
        long = Consumer(gated.engine, "long", prompt=[i % VOCAB for i in range(5 * PREFILL_CHUNK + 7)], max_tokens=2)
        nursery.start_soon(short.run)
        await short.started.wait()
        await gated.calls(2)
        nursery.start_soon(long.run)
        await long.started.wait()
        await gated.calls(20)
        await until(lambda: len(long.token_ids) == 2)
        short.scope.cancel()
    calls = gated.session.calls
    chunks = [call for call in calls if call[1] > 1]
    assert [new for _, new, _ in chunks] == [*[PREFILL_CHUNK] * 5, 7]
    for one, other in itertools.pairwise(chunks):
        assert calls.index(other) - calls.index(one) == 2  # a decode between them
    assert long.token_ids == greedy_tokens(long.request.prompt_token_ids, 2)


async def test_prompts_take_turns_within_the_budget_of_a_step(nursery: trio.Nursery) -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        ticking = Consumer(engine, "ticking", prompt=[1], max_tokens=4000)  # decodes once a step
        nursery.start_soon(ticking.run)
        await ticking.has(1)
        await engine.call_utility("pause_scheduler", "keep")
        session.calls.clear()
        async with trio.open_nursery() as others:
            for number in range(5):
                prompt = [number] * (2 * PREFILL_CHUNK)
                others.start_soon(generate, engine, a_request(str(number), prompt, max_tokens=1))
            await until(lambda: engine.live_requests == 6)
            await engine.call_utility("resume_scheduler")
        ticking.scope.cancel()
    chunks = [(past, step) for step, past in prompt_chunks_by_step(session.calls)]
    assert PREFILL_TOKENS == 2 * PREFILL_CHUNK
    assert [past for past, _ in chunks] == [0] * 5 + [PREFILL_CHUNK] * 5
    assert [step for _, step in chunks] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def prompt_chunks_by_step(calls: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(step, past length) of each chunk of a prompt, where each step begins with the decoding of one token."""
    step = 0
    chunks = []
    for _, new, past in calls:
        if new == 1:
            step += 1
        else:
            chunks.append((step, past))
    return chunks


async def test_a_cancelled_request_is_out_of_the_cache_after_the_running_step_and_others_go_on(
    nursery: trio.Nursery,
) -> None:
    async with gated_engine() as gated:
        engine = gated.engine
        keep = Consumer(engine, "keep", prompt=[1, 2], max_tokens=9)
        drop = Consumer(engine, "drop", prompt=[3, 4], max_tokens=9)
        nursery.start_soon(keep.run)
        nursery.start_soon(drop.run)
        await gated.calls(3)
        await until(lambda: engine.cached_sequences == 2)
        drop.scope.cancel()
        await drop.left.wait()
        assert engine.live_requests == 1
        await gated.calls(2)
        await until(lambda: engine.cached_sequences == 1)
        gated.session.gate = None
        gated.gate.release()
        await keep.left.wait()
        assert keep.token_ids == greedy_tokens([1, 2], 9)
        assert engine.cached_sequences == 0


async def test_a_cancelled_request_is_out_of_the_cache_at_once_when_no_step_runs(nursery: trio.Nursery) -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        consumers = [Consumer(engine, str(i), prompt=[i, 1], max_tokens=2000) for i in range(3)]
        for consumer in consumers:
            nursery.start_soon(consumer.run)
            await consumer.has(2)
        await engine.call_utility("pause_scheduler", "keep")
        assert engine.cached_sequences == 3
        for left, consumer in zip((2, 1, 0), consumers, strict=True):
            consumer.scope.cancel()
            await consumer.left.wait()
            assert engine.cached_sequences == left


async def test_a_request_cancelled_while_it_waits_never_reaches_the_model(nursery: trio.Nursery) -> None:
    async with gated_engine(max_live_sequences=1) as gated:
        first, second, third = (Consumer(gated.engine, name, prompt=[i], max_tokens=3) for i, name in enumerate("abc"))
        for consumer in (first, second, third):
            nursery.start_soon(consumer.run)
            await consumer.started.wait()
        second.scope.cancel()
        await second.left.wait()
        await gated.calls(6)
        await third.left.wait()
    assert third.token_ids == greedy_tokens([2], 3)
    assert len(gated.session.calls) == 6


async def test_requests_wait_for_a_place_by_priority_then_arrival(nursery: trio.Nursery) -> None:
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        async with gated.engine.generate(a_request(name, max_tokens=1, priority=priority)) as stream:
            started.add(name)
            await collect(stream)
            order.append(name)

    started: set[str] = set()
    async with gated_engine(max_live_sequences=1) as gated:
        for name, priority in [("running", 5), ("late", 7), ("first", -1), ("second", 0), ("third", 0)]:
            nursery.start_soon(run, name, priority)
            await until(lambda name=name: name in started)
        await gated.calls(5)
        await until(lambda: len(order) == 5)
    assert order == ["running", "first", "second", "third", "late"]


async def test_one_request_more_than_may_wait_is_refused() -> None:
    async with gated_engine(max_live_sequences=1, max_waiting_sequences=2) as gated, trio.open_nursery() as nursery:
        consumers = [Consumer(gated.engine, str(i), max_tokens=5) for i in range(3)]
        for consumer in consumers:
            nursery.start_soon(consumer.run)
            await consumer.started.wait()
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(EngineUnavailableError, match="2 requests wait"):
            await generate(gated.engine, a_request("one more"))
        nursery.cancel_scope.cancel()


async def test_abort_ends_running_and_waiting_requests_after_what_they_got_and_ignores_unknown_ids(
    nursery: trio.Nursery,
) -> None:
    async with gated_engine(max_live_sequences=1) as gated:
        running, waiting = (Consumer(gated.engine, name, prompt=[1], max_tokens=50) for name in ("running", "waiting"))
        for consumer in (running, waiting):
            nursery.start_soon(consumer.run)
            await consumer.started.wait()
        await gated.calls(3)
        await running.has(2)
        gated.engine.abort(["unknown", "waiting", "running", "running"])
        await running.left.wait()
        await waiting.left.wait()
        gated.engine.abort(["running"])
        assert running.outputs[-1].finish_reason is FinishReason.ABORT
        assert running.token_ids == greedy_tokens([1], len(running.token_ids))
        assert [(list(o.token_ids), o.finish_reason) for o in waiting.outputs] == [([], FinishReason.ABORT)]
        gated.gate.release()
        await until(lambda: gated.engine.cached_sequences == 0)


async def test_max_tokens_one_gives_one_token() -> None:
    async with run_engine(fake_model(HistorySession())) as engine:
        got = await generate(engine, a_request("a", max_tokens=1))
        assert (len(got.outputs), got.token_ids) == (1, greedy_tokens([2, 3], 1))


async def test_the_end_of_the_context_ends_a_request() -> None:
    async with run_engine(fake_model(HistorySession(), max_model_len=6)) as engine:
        got = await generate(engine, a_request("a", [1, 2, 3], max_tokens=50))
        assert (len(got.token_ids), got.finish_reason) == (3, FinishReason.LENGTH)


def first_repeat_free(prompt: list[int], count: int) -> list[int]:
    tokens = greedy_tokens(prompt, count)
    assert len(set(tokens)) == count, "choose another prompt: the test needs distinct tokens"
    return tokens


async def test_eos_stop_ids_and_further_eos_end_with_their_reasons() -> None:
    prompt = [1, 2, 3]
    tokens = first_repeat_free(prompt, 6)
    third = tokens[2]
    cases: list[tuple[dict[str, Any], int, FinishReason, int | None]] = [
        ({"eos_token_id": third}, 3, FinishReason.STOP, None),
        ({"stop_token_ids": [third]}, 3, FinishReason.STOP, third),
        ({"extra_eos_token_ids": [third]}, 3, FinishReason.STOP, third),
        ({"eos_token_id": third, "extra_eos_token_ids": [tokens[3]], "ignore_eos": True}, 6, FinishReason.LENGTH, None),
        ({"eos_token_id": third, "stop_token_ids": [tokens[4]], "ignore_eos": True}, 5, FinishReason.STOP, tokens[4]),
        ({"stop_token_ids": [tokens[5]]}, 6, FinishReason.STOP, tokens[5]),
    ]
    async with run_engine(fake_model(HistorySession())) as engine:
        for params, count, reason, stop_reason in cases:
            got = await generate(engine, a_request("a", prompt, max_tokens=6, **params))
            assert (got.token_ids, got.finish_reason, got.stop_reason) == (tokens[:count], reason, stop_reason), params
            assert [output.finish_reason for output in got.outputs[:-1]] == [None] * (count - 1)


async def test_before_min_tokens_neither_eos_nor_stop_ids_are_generated() -> None:
    prompt = [1, 2, 3]
    tokens = first_repeat_free(prompt, 2)
    async with run_engine(fake_model(HistorySession())) as engine:
        params = {"eos_token_id": tokens[0], "stop_token_ids": [tokens[1]], "min_tokens": 5}
        got = await generate(engine, a_request("a", prompt, max_tokens=9, **params))
    assert not {tokens[0], tokens[1]} & set(got.token_ids[:5])
    logits = logits_after(tuple(prompt)).copy()
    logits[tokens[:2]] = -np.inf
    assert got.token_ids[0] == logits.argmax()
    assert len(got.token_ids) >= 5


async def test_logprobs_come_with_every_token_and_are_of_the_raw_logits() -> None:
    prompt = [1, 2, 3]
    async with run_engine(fake_model(HistorySession())) as engine:
        params = {"temperature": 0.5, "seed": 3, "logprobs": 2, "logit_bias": {7: 50.0}, "presence_penalty": 2.0}
        got = await generate(engine, a_request("a", prompt, max_tokens=5, **params))
    history = tuple(prompt)
    for output, token_id in zip(got.outputs, got.token_ids, strict=True):
        logits = logits_after(history).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        lists = output.logprobs
        assert lists is not None
        assert lists.token_ids.tolist() == [[token_id, *np.argsort(-logits)[:2].tolist()]]
        np.testing.assert_allclose(lists.logprobs[0], logprobs[lists.token_ids[0]], atol=1e-5)
        assert lists.ranks.tolist() == [(logits >= logits[token_id]).sum()]
        history += (token_id,)


@pytest.mark.parametrize("length", [1, 2, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 50])
async def test_prompt_logprobs_are_those_of_every_prompt_token_but_the_first(length: int) -> None:
    prompt = [(7 * i) % VOCAB for i in range(length)]
    async with run_engine(fake_model(HistorySession())) as engine:
        got = await generate(engine, a_request("a", prompt, max_tokens=2, prompt_logprobs=1))
    assert got.outputs[1].prompt_logprobs is None
    lists = got.outputs[0].prompt_logprobs
    assert lists is not None
    assert len(lists.ranks) == len(lists.logprobs) == len(lists.token_ids) == length - 1
    for row in range(length - 1):
        logits = logits_after(tuple(prompt[: row + 1])).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert lists.token_ids[row].tolist() == [prompt[row + 1], logits.argmax()]
        np.testing.assert_allclose(lists.logprobs[row], logprobs[lists.token_ids[row]], atol=1e-5)
        assert lists.ranks[row] == (logits >= logits[prompt[row + 1]]).sum()


async def test_a_sink_gets_what_the_channel_would_have_got(nursery: trio.Nursery) -> None:
    async def with_sink(engine: EmbeddedEngine) -> tuple[list[int], list[int]]:
        sunk: list[int] = []
        threads: set[int] = set()
        joined: list[int] = []

        def sink(output: EngineOutput) -> bool:
            assert output.finish_reason is None
            threads.add(threading.get_ident())
            sunk.extend(output.token_ids)
            joined.extend(output.token_ids)
            return True

        async with engine.generate(a_request("sink", [4, 5], max_tokens=30)) as stream:
            stream.set_sink(sink)
            async for batch in stream:
                joined += [token_id for output in batch for token_id in output.token_ids]
        assert threads == {threading.get_ident()}
        return joined, sunk

    async with run_engine(fake_model(HistorySession())) as engine:
        joined, sunk = await with_sink(engine)
    assert joined == greedy_tokens([4, 5], 30)
    assert len(sunk) > 20


@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_a_failing_step_makes_the_engine_unhealthy_and_ends_every_request(
    tokens_before: int, nursery: trio.Nursery
) -> None:
    seen: list[EngineState] = []

    async def watch(consumer: Consumer) -> None:
        await consumer.left.wait()
        seen.append(gated.engine.health.value.state)

    async with gated_engine(max_live_sequences=1) as gated:
        engine = gated.engine
        running, waiting = Consumer(engine, "running", max_tokens=50), Consumer(engine, "waiting", max_tokens=50)
        for consumer in (running, waiting):
            nursery.start_soon(consumer.run)
            nursery.start_soon(watch, consumer)
            await consumer.started.wait()
        if tokens_before:
            await gated.calls(tokens_before)
            await running.has(tokens_before)
        gated.session.error = RuntimeError("out of memory")
        gated.gate.release()
        with trio.fail_after(10):
            await engine.health.wait_value(lambda health: health.state is EngineState.UNHEALTHY)
            await running.left.wait()
            await waiting.left.wait()
        await until(lambda: len(seen) == 2)
        assert seen == [EngineState.UNHEALTHY] * 2
        assert "out of memory" in engine.health.value.detail
        assert running.token_ids == greedy_tokens([2, 3], tokens_before)
        assert isinstance(running.error, EngineError)
        assert isinstance(waiting.error, EngineError)
        assert (engine.live_requests, engine.cached_sequences) == (0, 0)
        with pytest.raises(EngineUnavailableError, match="out of memory"):
            await generate(engine, a_request("late"))


async def test_health_changes_before_the_first_request_is_told(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineState] = []
    close_with_error = RequestOutputs.close_with_error

    def spy(outputs: RequestOutputs, error: EngineError) -> None:
        seen.append(gated.engine.health.value.state)
        close_with_error(outputs, error)

    monkeypatch.setattr(RequestOutputs, "close_with_error", spy)
    async with gated_engine() as gated:
        consumer = Consumer(gated.engine, "a")
        nursery.start_soon(consumer.run)
        await consumer.started.wait()
        gated.session.error = RuntimeError("broken")
        gated.gate.release()
        await consumer.left.wait()
    assert seen == [EngineState.UNHEALTHY]


async def test_logits_that_are_not_finite_end_their_own_request_only() -> None:
    class Faulty(HistorySession):
        def run(self, token_ids: np.ndarray, cache: Any) -> np.ndarray:
            logits = super().run(token_ids, cache)
            for row, history in enumerate(cache.arrays[0][:, 0, :, 0]):
                if history[0] == 9 and len(history) == 5:
                    logits[row] = np.nan
            return logits

    async with run_engine(fake_model(Faulty())) as engine, trio.open_nursery() as nursery:
        bad, good = (
            Consumer(engine, "bad", prompt=[9, 1], max_tokens=9),
            Consumer(engine, "good", prompt=[8, 1], max_tokens=9),
        )
        nursery.start_soon(bad.run)
        nursery.start_soon(good.run)
        await bad.left.wait()
        await good.left.wait()
        assert bad.token_ids == greedy_tokens([9, 1], 3)
        assert bad.error is not None
        assert "not finite" in bad.error.message
        assert good.token_ids == greedy_tokens([8, 1], 9)
        assert engine.health.value.serving


async def test_closing_the_engine_ends_live_requests_with_an_error(nursery: trio.Nursery) -> None:
    async with run_engine(fake_model(HistorySession())) as engine:
        consumer = Consumer(engine, "a", max_tokens=4000)
        nursery.start_soon(consumer.run)
        await consumer.has(2)
    await consumer.left.wait()
    assert isinstance(consumer.error, EngineError)
    assert engine.health.value.state is EngineState.LOST
    assert (engine.live_requests, engine.cached_sequences) == (0, 0)
    with pytest.raises(EngineUnavailableError, match="closed"):
        await generate(engine, a_request("late"))


async def test_an_exception_in_the_engines_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with run_engine(fake_model(HistorySession())) as engine, engine.generate(a_request("a")):
            raise ZeroDivisionError


async def test_an_exception_in_the_engines_block_comes_out_also_when_the_block_is_cancelled_meanwhile() -> None:
    async def fail() -> None:
        with trio.CancelScope() as scope:
            async with run_engine(fake_model(HistorySession())):
                scope.cancel()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_cancelling_the_engines_block_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(1) as scope:
        async with run_engine(fake_model(HistorySession())):
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_paused_the_engine_takes_requests_and_lets_them_wait(nursery: trio.Nursery) -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        assert await engine.call_utility("is_scheduler_paused") == [False]
        running = Consumer(engine, "running", max_tokens=3000)
        nursery.start_soon(running.run)
        await running.has(1)
        assert await engine.call_utility("pause_scheduler", "abort", True) == [None]
        assert await engine.call_utility("is_scheduler_paused") == [True]
        await running.left.wait()
        assert running.outputs[-1].finish_reason is FinishReason.ABORT
        calls = len(session.calls)
        waiting = Consumer(engine, "waiting", max_tokens=4)
        nursery.start_soon(waiting.run)
        await trio.testing.wait_all_tasks_blocked()
        assert (engine.live_requests, len(session.calls)) == (1, calls)
        assert await engine.call_utility("resume_scheduler") == [None]
        await waiting.left.wait()
        assert waiting.token_ids == greedy_tokens([2, 3], 4)
        assert await engine.call_utility("is_scheduler_paused") == [False]


async def test_a_pause_that_waits_lets_running_requests_end_and_holds_new_ones_back(nursery: trio.Nursery) -> None:
    async with gated_engine() as gated:
        engine = gated.engine
        running, waiting = Consumer(engine, "running", max_tokens=4), Consumer(engine, "waiting", max_tokens=2)
        nursery.start_soon(running.run)
        await running.started.wait()
        await gated.calls(2)
        await running.has(2)
        with pytest.raises(UtilityCallError, match="still run"):
            await engine.call_utility("pause_scheduler", "wait", timeout=0.01)
        nursery.start_soon(waiting.run)
        await waiting.started.wait()
        gated.gate.release(100)
        assert await engine.call_utility("pause_scheduler", "wait") == [None]
        await running.left.wait()
        assert running.token_ids == greedy_tokens([2, 3], 4)
        assert waiting.token_ids == []
        await engine.call_utility("resume_scheduler")
        await waiting.left.wait()
        assert waiting.token_ids == greedy_tokens([2, 3], 2)


async def test_a_pause_that_keeps_stops_requests_where_they_are_and_they_go_on_later(nursery: trio.Nursery) -> None:
    session = HistorySession()
    async with run_engine(fake_model(session)) as engine:
        running = Consumer(engine, "running", max_tokens=400)
        nursery.start_soon(running.run)
        await running.has(2)
        await engine.call_utility("pause_scheduler", "keep")
        calls = len(session.calls)
        await trio.testing.wait_all_tasks_blocked()
        assert len(session.calls) == calls
        await engine.call_utility("resume_scheduler")
        await running.left.wait()
        assert running.token_ids == greedy_tokens([2, 3], 400)


async def test_other_utility_calls_and_ranks_are_refused() -> None:
    async with run_engine(fake_model(HistorySession())) as engine:
        for method in ("sleep", "add_lora", "__init__", "_pause"):
            with pytest.raises(UnsupportedCallError, match=method):
                await engine.call_utility(method)
        assert await engine.call_utility("is_sleeping") == [False]
        with pytest.raises(UtilityCallError, match="invalid pause mode: never"):
            await engine.call_utility("pause_scheduler", "never")
        with pytest.raises(DataParallelRankError, match="rank 1"):
            await generate(engine, a_request("a", rank=1))
        assert len((await generate(engine, a_request("a", rank=0))).token_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "0 tokens"), ([1] * 64, "64 tokens"), ([1, VOCAB], "outside"), ([-1], "outside")]
)
async def test_a_prompt_that_would_break_the_model_is_refused(prompt: list[int], message: str) -> None:
    async with run_engine(fake_model(HistorySession(), max_model_len=64)) as engine:
        with pytest.raises(EngineError, match=message) as caught:
            await generate(engine, a_request("a", prompt))
        assert caught.value.code == "validation_error"
        assert engine.health.value.serving


async def test_two_live_requests_with_one_id_are_refused() -> None:
    async with gated_engine() as gated, gated.engine.generate(a_request("same")):
        with pytest.raises(ValueError, match="same"):
            await generate(gated.engine, a_request("same"))


async def test_capabilities_name_one_engine_with_an_id_of_its_own() -> None:
    ids = set()
    for _ in range(2):
        async with run_engine(
            fake_model(HistorySession(), max_model_len=99), max_logprobs=7, max_live_sequences=3
        ) as engine:
            (info,) = engine.capabilities.engines
            assert (engine.capabilities.max_model_len, engine.capabilities.max_logprobs) == (99, 7)
            assert (info.max_model_len, info.max_num_seqs, info.vllm_version, info.rank) == (99, 3, "embedded", 0)
            ids.add(info.instance_id)
    assert len(ids) == 2


async def test_a_request_whose_constraint_takes_long_to_compile_can_be_given_up_at_once() -> None:
    begun, free = trio.Event(), threading.Event()

    def slow(_: object) -> None:
        trio.from_thread.run_sync(begun.set)
        free.wait(20)

    async with run_engine(fake_model(HistorySession())) as engine:
        engine._compiler.compile = slow  # type: ignore[assignment, method-assign]
        try:
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    request = a_request("a", structured_output=StructuredOutput("regex", "a"))
                    nursery.start_soon(generate, engine, request)
                    await begun.wait()
                    nursery.cancel_scope.cancel()
        finally:
            free.set()
        assert engine.live_requests == 0
