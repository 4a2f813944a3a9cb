"""Protects what happens when an engine fails: who hears of it, and whether the server ends or waits for another."""

# ruff: noqa: PT012 - the server is the block, and what it raises is raised at its end

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.lifecycle.calls import NOT_SERVING, SERVING, StatusCode, check, generate, prompt, stream, watching
from trio_frontend.engine.base import Engine, EngineState, FinishReason
from trio_frontend.server import EngineDiedError
from trio_frontend.testing import ScriptedEngine, open_frontend

H = 39


def opener(engine: ScriptedEngine):  # type: ignore[no-untyped-def]
    """What a server opens, and so owns."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        yield engine

    return opened


@pytest.mark.parametrize("state", [EngineState.UNHEALTHY, EngineState.LOST])
async def test_an_owned_engine_that_dies_ends_the_server_in_order_and_says_why(engine, config, state) -> None:
    with pytest.raises(EngineDiedError, match=f"{state.value}.*the reason"):
        async with open_frontend(opener(engine), config()) as frontend:
            async with frontend.connect() as channel, watching(channel) as statuses:
                assert await anext(statuses) == SERVING
                engine.fail(state, "the reason")
                assert await statuses.rest() == [NOT_SERVING]
            await trio.sleep_forever()
    assert frontend.server.finished.is_set()


async def test_an_owned_engine_that_dies_skips_the_withdrawal_but_not_the_drain(
    engine, config, nursery, autojump_clock
) -> None:
    with pytest.raises(EngineDiedError):
        async with open_frontend(opener(engine), config(withdrawal_grace=1000)) as frontend:
            async with frontend.connect() as channel:
                outcome = await nursery.start(stream, channel)
                request = await engine.next_request()
                # Its health fails, and this request still finishes: the drain waits for it.
                engine.set_health(EngineState.UNHEALTHY)
                await trio.sleep(5)
                request.send([H], finish_reason=FinishReason.LENGTH)
                await outcome.ended.wait()
                assert outcome.text == "H"
                await frontend.server.finished.wait()
            await trio.sleep_forever()
    assert trio.current_time() < 12


async def test_requests_in_flight_are_internal_when_an_owned_engine_dies(engine, config, nursery) -> None:
    with pytest.raises(EngineDiedError):
        async with open_frontend(opener(engine), config()) as frontend:
            async with frontend.connect() as channel:
                outcome = await nursery.start(stream, channel)
                (await engine.next_request()).send([H])
                await wait_all_tasks_blocked()
                engine.fail(EngineState.LOST)
                await outcome.ended.wait()
                assert (outcome.text, outcome.status) == ("H", StatusCode.INTERNAL)
            await trio.sleep_forever()


async def test_an_owned_engine_may_be_waited_for_if_told_so(engine, config) -> None:
    async with open_frontend(opener(engine), config(on_engine_death="stay")) as frontend, frontend.connect() as channel:
        engine.fail(EngineState.LOST)
        await wait_all_tasks_blocked()
        assert await check(channel) == NOT_SERVING
        assert not frontend.server.shutting_down


async def test_an_engine_of_anothers_that_dies_leaves_the_server_waiting_and_calls_unavailable(channel, engine) -> None:
    engine.fail(EngineState.LOST)
    await wait_all_tasks_blocked()
    assert await check(channel) == NOT_SERVING
    assert (await generate(channel)).status is StatusCode.UNAVAILABLE


async def test_an_engine_of_anothers_may_end_the_server_if_told_so(engine, config) -> None:
    with pytest.raises(EngineDiedError):
        async with open_frontend(engine, config(on_engine_death="exit")):
            engine.fail(EngineState.UNHEALTHY)
            await trio.sleep_forever()


async def test_an_engine_that_comes_back_serves_again(channel, engine, nursery) -> None:
    engine.fail(EngineState.LOST)
    await wait_all_tasks_blocked()
    engine.set_health(EngineState.SERVING)
    await wait_all_tasks_blocked()
    assert await check(channel) == SERVING
    outcome = await nursery.start(stream, channel)
    (await engine.next_request()).send([H], finish_reason=FinishReason.LENGTH)
    await outcome.ended.wait()
    assert outcome.text == "H"


async def test_a_stall_ends_no_server_also_when_the_engine_is_owned(engine, config, nursery) -> None:
    async with open_frontend(opener(engine), config()) as frontend, frontend.connect() as channel:
        outcome = await nursery.start(stream, channel)
        request = await engine.next_request()
        engine.set_health(EngineState.STALLED)
        await wait_all_tasks_blocked()
        assert await check(channel) == NOT_SERVING
        engine.set_health(EngineState.SERVING)
        request.send([H], finish_reason=FinishReason.LENGTH)
        await outcome.ended.wait()
        assert not frontend.server.shutting_down
        assert await check(channel) == SERVING


async def test_a_crash_in_the_engines_own_code_ends_everything_in_order_and_is_reported_once(
    engine, config, nursery
) -> None:
    crash = trio.Event()

    async def run() -> None:
        await crash.wait()
        raise LookupError("a fault of the engine")

    @asynccontextmanager
    async def crashing() -> AsyncIterator[Engine]:
        async with trio.open_nursery() as inner:
            inner.start_soon(run)
            yield engine
            inner.cancel_scope.cancel()

    outcomes = []
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            open_frontend(crashing, config(withdrawal_grace=1000)) as frontend,
            frontend.connect() as channel,
            watching(channel) as statuses,
        ):
            outcomes.append(await nursery.start(stream, channel, prompt()))
            await engine.next_request()
            assert await anext(statuses) == SERVING
            crash.set()
            with trio.CancelScope(shield=True):
                assert await statuses.rest() == [NOT_SERVING]
                await outcomes[0].ended.wait()
    assert outcomes[0].status is StatusCode.UNAVAILABLE
    # The group is of the engine's own nursery; ours add none.
    assert [repr(error) for error in caught.value.exceptions] == ["LookupError('a fault of the engine')"]


async def test_an_engine_that_dies_during_the_drain_ends_the_rest_and_the_drain(
    engine, config, nursery, autojump_clock
) -> None:
    async with open_frontend(engine, config(shutdown_timeout=1000)) as frontend, frontend.connect() as channel:
        outcome = await nursery.start(stream, channel)
        await engine.next_request()
        frontend.server.begin_shutdown("test")
        await trio.sleep(5)
        engine.fail(EngineState.LOST)
        await frontend.server.finished.wait()
        assert outcome.status is StatusCode.INTERNAL
        assert trio.current_time() < 12
