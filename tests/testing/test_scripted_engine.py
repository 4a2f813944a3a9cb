"""Protects the engine that other tests stand on: it must behave at the seam as a real engine does."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from trio_frontend.engine.base import (
    DataParallelRankError,
    EngineError,
    EngineHealth,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    OutputStream,
    SamplingParams,
    UnsupportedCallError,
    UtilityCallError,
)
from trio_frontend.testing import ScriptedEngine, one_token_per_step


def a_request(request_id: str = "r", **kwargs: Any) -> EngineRequest:
    return EngineRequest(request_id, [1, 2], SamplingParams(max_tokens=16), **kwargs)


async def collect(stream: OutputStream) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    reason = None
    async for batch in stream:
        for output in batch:
            token_ids += output.token_ids
            reason = output.finish_reason
    return token_ids, reason


async def test_what_the_test_sends_is_what_the_consumer_gets() -> None:
    engine = ScriptedEngine()
    request = a_request()
    async with engine.generate(request) as stream:
        handle = await engine.next_request()
        assert handle.request is request
        assert engine.live_requests == 1
        handle.send([5])
        handle.send([6, 7], finish_reason=FinishReason.STOP, stop_reason=7)
        assert await collect(stream) == ([5, 6, 7], FinishReason.STOP)
    assert engine.live_requests == 0
    assert handle.closed.is_set()
    assert not handle.aborted.is_set()


async def test_leaving_the_scope_before_the_last_output_tells_the_engine_to_stop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = ScriptedEngine()
    with trio.move_on_after(1):
        async with engine.generate(a_request()) as stream:
            await collect(stream)
    handle = await engine.next_request()
    assert handle.aborted.is_set()
    assert engine.live_requests == 0
    handle.send([1])  # goes nowhere


async def test_an_exception_in_the_scope_comes_out_as_it_is() -> None:
    engine = ScriptedEngine()
    with pytest.raises(ZeroDivisionError):
        async with engine.generate(a_request()):
            raise ZeroDivisionError
    assert (await engine.next_request()).aborted.is_set()


async def test_a_failed_request_raises_after_what_was_sent() -> None:
    engine = ScriptedEngine()
    async with engine.generate(a_request()) as stream:
        handle = await engine.next_request()
        handle.send([5])
        handle.fail(EngineError("broken", code="validation_error"))
        assert [list(output.token_ids) for output in await stream.__anext__()] == [[5]]
        with pytest.raises(EngineError, match="broken") as caught:
            await stream.__anext__()
        assert caught.value.code == "validation_error"


async def test_abort_ends_a_stream_after_what_was_sent_and_ignores_unknown_ids() -> None:
    engine = ScriptedEngine()
    async with engine.generate(a_request("a")) as stream:
        handle = await engine.next_request()
        handle.send([5])
        engine.abort(["a", "unknown"])
        engine.abort(["a"])
        assert handle.aborted.is_set()
        assert await collect(stream) == ([5], FinishReason.ABORT)


async def test_a_failing_engine_says_so_before_its_requests_end(nursery: trio.Nursery) -> None:
    engine = ScriptedEngine()
    seen: list[str] = []

    async def watch() -> None:
        await engine.health.wait_value(lambda health: not health.serving)
        seen.append("health")

    async def consume() -> None:
        async with engine.generate(a_request()) as stream:
            try:
                await collect(stream)
            except EngineError:
                assert engine.health.value == EngineHealth(EngineState.LOST, "gone")
                seen.append("request")

    nursery.start_soon(watch)
    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    engine.fail(EngineState.LOST, "gone")
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(seen) == ["health", "request"]
    with pytest.raises(EngineUnavailableError, match="gone"):
        async with engine.generate(a_request()):
            pass


async def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataParallelRankError, match="3"):
        async with ScriptedEngine().generate(a_request(data_parallel_rank=3)):
            pass


async def test_a_script_answers_every_request_on_trios_clock(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    engine = ScriptedEngine()
    await nursery.start(engine.play, lambda request: one_token_per_step([1, 2, 3]), 0.5)
    start = trio.current_time()
    async with engine.generate(a_request("a")) as first, engine.generate(a_request("b")) as second:
        assert await collect(first) == ([1, 2, 3], FinishReason.LENGTH)
        assert await collect(second) == ([1, 2, 3], FinishReason.LENGTH)
    assert trio.current_time() - start == pytest.approx(1.5)


async def test_a_script_can_fail_and_can_fall_silent(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    engine = ScriptedEngine()
    scripts = {"fails": [EngineOutput([1]), EngineError("scripted")], "silent": [EngineOutput([1])]}
    nursery.start_soon(engine.play, lambda request: scripts[request.request_id])
    async with engine.generate(a_request("fails")) as stream:
        with pytest.raises(EngineError, match="scripted"):
            await collect(stream)
    with trio.move_on_after(10) as scope:
        async with engine.generate(a_request("silent")) as stream:
            await collect(stream)
    assert scope.cancelled_caught


async def test_utility_calls_are_recorded_and_answered_by_the_given_callable(autojump_clock: trio.testing.MockClock) -> None:
    engine = ScriptedEngine()
    with pytest.raises(UnsupportedCallError):
        await engine.call_utility("sleep", 1)
    engine.utility = lambda method, *args: [f"{method}{args}"]
    assert await engine.call_utility("sleep", 1) == ["sleep(1,)"]

    async def never(method: str, *args: Any) -> list[Any]:
        await trio.sleep_forever()
        raise AssertionError

    engine.utility = never
    with pytest.raises(UtilityCallError, match="no answer within 2 s"):
        await engine.call_utility("wake_up", timeout=2)
    assert engine.utility_calls == [("sleep", (1,)), ("sleep", (1,)), ("wake_up", ())]
