"""An engine's death at any point of a request's life: health first, then every request and call, and nothing of it in the next life."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from tests.engine.vllm.scripted import (
    PATIENCE,
    ScriptedCore,
    engine_with_core,
    heard,
    request,
    scripted_core,
    starting_engine,
    until,
)
from trio_frontend.engine.base import (
    DataParallelRankError,
    EngineError,
    EngineHealth,
    EngineOutput,
    EngineState,
    EngineUnavailableError,
    OutputStream,
    UtilityCallError,
)
from trio_frontend.engine.vllm import VllmEngine, wait_started
from trio_frontend.engine.vllm.connection import Step

BRIEFLY = 0.1
"""Seconds to let something arrive that must change nothing."""

PROMPTLY = 1.0
"""Seconds within which a death must be seen."""

Death = tuple[Callable[[ScriptedCore], None], EngineState, str]

DEATHS: dict[str, Death] = {
    "connection lost": (ScriptedCore.die, EngineState.LOST, "the connection to the engine was lost"),
    "ENGINE_CORE_DEAD": (
        lambda core: core.send_frames(b"ENGINE_CORE_DEAD"),
        EngineState.UNHEALTHY,
        "the engine said that it is dead",
    ),
    "garbage": (lambda core: core.send_frames(b"\xc1garbage"), EngineState.UNHEALTHY, "undecodable engine outputs"),
    "inconsistent logprobs": (
        lambda core: core.send(["r", [1], [["<i4", [1, 1], 9], None, None]]),
        EngineState.UNHEALTHY,
        "auxiliary frame 9",
    ),
}

every_death = pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())


async def collect_until_error(outputs: OutputStream, found: list[EngineOutput]) -> EngineError:
    with pytest.raises(EngineError) as caught:  # noqa: PT012
        async for batch in outputs:
            found += batch
    return caught.value


async def wait_failed(engine: VllmEngine) -> EngineHealth:
    with trio.fail_after(PROMPTLY):
        health: EngineHealth = await engine.health.wait_value(lambda value: not value.serving)
        return health


@every_death
async def test_a_request_that_waits_for_its_first_output(death: Death) -> None:
    kill, state, detail = death
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        kill(core)
        with trio.fail_after(PROMPTLY):
            error = await collect_until_error(outputs, [])
        assert detail in str(error)
        assert engine.health.value.state is state
        assert detail in engine.health.value.detail
        assert engine.live_requests == 0


@every_death
async def test_a_request_that_has_had_outputs_keeps_them(death: Death) -> None:
    kill, _, _ = death
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        for token in range(5):
            core.send(["r", [token]])
        kill(core)
        found: list[EngineOutput] = []
        with trio.fail_after(PROMPTLY):
            await collect_until_error(outputs, found)
        assert [token for output in found for token in output.token_ids] == list(range(5))


@pytest.mark.parametrize("kind", ["connection lost", "ENGINE_CORE_DEAD", "garbage"])
async def test_a_request_whose_last_output_was_sent_ends_well(kind: str) -> None:
    kill, _, _ = DEATHS[kind]
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        core.finish("r", [5])
        kill(core)
        await wait_failed(engine)
        assert [output.token_ids async for batch in outputs for output in batch] == [[5]]


@every_death
async def test_a_consumer_that_looks_later_gets_what_came_and_then_the_error(death: Death) -> None:
    kill, _, _ = death
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        core.send(["r", [5]])
        kill(core)
        await wait_failed(engine)
        found: list[EngineOutput] = []
        await collect_until_error(outputs, found)
        assert [output.token_ids for output in found] == [[5]]


async def test_a_request_whose_add_the_engine_never_read() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        core.die()
        with trio.fail_after(PROMPTLY):
            await collect_until_error(outputs, [])


async def test_a_request_that_is_leaving_while_the_engine_dies() -> None:
    async with engine_with_core() as (engine, core):
        async with engine.generate(request()):
            await core.receive_add()
            core.die()
        await wait_failed(engine)
        assert engine.live_requests == 0


@every_death
async def test_new_requests_are_refused_and_say_why(death: Death) -> None:
    kill, state, detail = death
    async with engine_with_core() as (engine, core), AsyncExitStack() as stack:
        await stack.enter_async_context(engine.generate(request()))
        kill(core)
        await wait_failed(engine)
        with pytest.raises(EngineUnavailableError, match=f"no engine: {state.value}, rank 0: .*{detail}"):
            async with engine.generate(request("next")):
                pytest.fail("entered")
        with pytest.raises(EngineUnavailableError):
            await engine.call_utility("is_sleeping")


@every_death
async def test_a_utility_call_in_flight_ends_with_the_engine(death: Death) -> None:
    kill, _, detail = death
    async with engine_with_core() as (engine, core), AsyncExitStack() as stack, trio.open_nursery() as nursery:
        await stack.enter_async_context(engine.generate(request()))
        errors: list[Exception] = []

        async def call() -> None:
            with pytest.raises(UtilityCallError) as caught:
                await engine.call_utility("wake_up", None)
            errors.append(caught.value)

        nursery.start_soon(call)
        await core.receive_add()
        await core.receive_utility()
        kill(core)
        nursery.cancel_scope.deadline = trio.current_time() + PROMPTLY
    assert detail in str(errors[0])
    assert "wake_up" in str(errors[0])


@every_death
async def test_health_is_published_before_any_request_ends(death: Death) -> None:
    kill, state, _ = death
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:
        seen: list[EngineState] = []

        async def consume(number: int) -> None:
            async with engine.generate(request("r" if number == 0 else f"r{number}")) as outputs:
                await collect_until_error(outputs, [])
                seen.append(engine.health.value.state)

        for number in range(20):
            nursery.start_soon(consume, number)
        for _ in range(20):
            await core.receive_add()
        kill(core)
        nursery.cancel_scope.deadline = trio.current_time() + PROMPTLY
    assert seen == [state] * 20


async def test_the_first_failure_is_the_one_that_stays() -> None:
    async with engine_with_core() as (engine, core):
        core.send_frames(b"ENGINE_CORE_DEAD")
        core.die()
        await wait_failed(engine)
        await trio.sleep(BRIEFLY)
        assert engine.health.value == EngineHealth(EngineState.UNHEALTHY, "rank 0: the engine said that it is dead")


async def test_the_engines_last_words_are_heard_when_the_input_goes_first() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        core.inputs[0].close(linger=0)
        core.finish("r", [5])
        core.send_frames(b"ENGINE_CORE_DEAD")
        await wait_failed(engine)
        assert [output.token_ids async for batch in outputs for output in batch] == [[5]]
        assert engine.health.value.state is EngineState.UNHEALTHY


async def test_an_engine_that_lost_its_input_and_floods_its_output_does_not_hold_us_up() -> None:
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:

        async def flood() -> None:
            while True:
                with suppress(zmq.Again):
                    core.outputs[0].send(core.encoded(["nobody's", [1]]), zmq.NOBLOCK)
                await trio.lowlevel.checkpoint()

        nursery.start_soon(flood)
        await trio.sleep(0.05)
        core.inputs[0].close(linger=0)
        assert (await wait_failed(engine)).state is EngineState.LOST
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("side", ["inputs", "outputs"])
async def test_the_loss_of_one_of_its_connections_is_the_loss_of_the_engine(side: str) -> None:
    async with engine_with_core() as (engine, core):
        getattr(core, side)[0].close(linger=0)
        assert (await wait_failed(engine)).state is EngineState.LOST


async def test_an_engine_that_speaks_after_its_failure_is_not_heard() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        core.send_frames(b"\xc1")
        await wait_failed(engine)
        core.finish("r", [5])
        await trio.sleep(BRIEFLY)
        with pytest.raises(EngineError):
            await anext(outputs)
        assert engine.health.value.state is EngineState.UNHEALTHY


# One of several.


async def two_engines(stack: AsyncExitStack) -> tuple[VllmEngine, ScriptedCore, ScriptedCore]:
    engine = await stack.enter_async_context(starting_engine(data_parallel_size=2))
    zero = await stack.enter_async_context(scripted_core(engine, 0))
    one = await stack.enter_async_context(scripted_core(engine, 1))
    await zero.join()
    await one.join()
    await wait_started(engine, PATIENCE)
    return engine, zero, one


async def test_the_requests_of_other_engines_live_on_and_new_ones_go_to_them() -> None:
    async with AsyncExitStack() as stack:
        engine, zero, one = await two_engines(stack)
        lost = await stack.enter_async_context(engine.generate(request("lost", data_parallel_rank=0)))
        kept = await stack.enter_async_context(engine.generate(request("kept", data_parallel_rank=1)))
        zero.die()
        health = await wait_failed(engine)
        assert health == EngineHealth(EngineState.LOST, "rank 0: the connection to the engine was lost")
        await collect_until_error(lost, [])
        one.finish("kept", [5])
        assert [output.token_ids async for batch in kept for output in batch] == [[5]]
        assert (await one.receive_add())[0] == "kept"
        for number in range(3):
            await stack.enter_async_context(engine.generate(request(f"r{number}")))
            assert (await one.receive_add())[0] == f"r{number}"
        with pytest.raises(DataParallelRankError, match="rank 0; connected: 1"):
            async with engine.generate(request(data_parallel_rank=0)):
                pytest.fail("entered")


async def test_a_utility_call_needs_every_engine() -> None:
    async with AsyncExitStack() as stack:
        engine, _, one = await two_engines(stack)
        one.die()
        await wait_failed(engine)
        with pytest.raises(EngineUnavailableError, match="rank 1"):
            await engine.call_utility("is_sleeping")


# The next life.


async def test_an_engine_that_comes_back_is_taken_in_and_serves() -> None:
    async with engine_with_core() as (engine, first):
        for life in range(3):
            first.die()
            await wait_failed(engine)
            async with scripted_core(engine) as again:
                await again.join(max_model_len=1000 + life, instance_id=f"life {life}")
                with trio.fail_after(PATIENCE):
                    await engine.health.wait_value(lambda health: health.serving)
                assert engine.capabilities.max_model_len == 1000 + life
                assert engine.capabilities.engines[0].instance_id == f"life {life}"
                async with engine.generate(request()) as outputs:
                    assert (await again.receive_add())[0] == "r"
                    again.finish("r", [life])
                    assert [output.token_ids async for batch in outputs for output in batch] == [[life]]
                first = again
                again.die()
                await wait_failed(engine)


async def test_health_stays_failed_until_the_new_handshake_is_complete() -> None:
    async with engine_with_core() as (engine, first):
        first.die()
        await wait_failed(engine)
        async with scripted_core(engine) as again:
            again.hello()
            await again.receive_init()
            again.connect_inputs()
            again.send_ready_response()
            again.connect_outputs()
            await until(lambda: [missing.step for missing in engine.missing()] == [Step.READY])
            assert engine.health.value.state is EngineState.LOST
            with pytest.raises(EngineUnavailableError):
                async with engine.generate(request()):
                    pytest.fail("entered")
            again.ready()
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda health: health.serving)


async def test_nothing_that_the_old_life_says_is_heard_in_the_new_one() -> None:
    async with engine_with_core() as (engine, old):
        old.send_frames(b"ENGINE_CORE_DEAD")  # it says so, and goes on talking
        await wait_failed(engine)
        async with scripted_core(engine) as new:
            await new.join()
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda health: health.serving)
            assert not set(new.addresses["outputs"]) & set(old.addresses["outputs"])
            async with engine.generate(request()) as outputs:
                await new.receive_add()
                old.finish("r", [666])
                old.send_frames(b"ENGINE_CORE_DEAD")
                old.die()
                await trio.sleep(BRIEFLY)
                new.finish("r", [5])
                assert [output.token_ids async for batch in outputs for output in batch] == [[5]]
            assert engine.health.value.serving


async def test_aborts_of_the_old_life_do_not_reach_the_new_one() -> None:
    async with engine_with_core() as (engine, old), AsyncExitStack() as stack:
        await stack.enter_async_context(engine.generate(request("of the old life")))
        await old.receive_add()
        old.die()
        await wait_failed(engine)
        async with scripted_core(engine) as new:
            await new.join()
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda health: health.serving)
            await stack.aclose()
            async with engine.generate(request("of the new life")):
                assert (await new.receive_add())[0] == "of the new life"


# Stalls.


async def test_a_stall_is_seen_and_ends_when_outputs_flow() -> None:
    async with engine_with_core(stall_timeout=0.15) as (engine, core):
        await trio.sleep(0.3)
        assert engine.health.value.serving  # idle
        async with engine.generate(request()) as outputs:
            await core.receive_add()
            health = await wait_failed(engine)
            assert health.state is EngineState.STALLED
            assert health.detail == "rank 0: requests are running and no output came for 0.15 s"
            core.send(stats={"num_running_reqs": 1})
            await heard(engine, core)
            assert engine.health.value.state is EngineState.STALLED
            core.send(["r", [5]])
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda value: value.serving)
            core.finish("r", [6])
            found: list[Any] = [output.token_ids async for batch in outputs for output in batch]
            assert found == [[5], [6]]


async def test_a_stalled_engine_still_takes_requests() -> None:
    async with engine_with_core(stall_timeout=0.05) as (engine, core), engine.generate(request("stuck")):
        assert (await wait_failed(engine)).state is EngineState.STALLED
        async with engine.generate(request("next")) as outputs:
            core.finish("next", [5])
            assert [output.token_ids async for batch in outputs for output in batch] == [[5]]
