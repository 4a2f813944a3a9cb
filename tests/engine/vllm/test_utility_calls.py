"""Utility calls reach every engine, their answers find their callers, and their failures say what happened."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from tests.engine.vllm.scripted import PATIENCE, ScriptedCore, engine_with_core, request, scripted_core, starting_engine
from trio_frontend.engine.base import EngineUnavailableError, UnsupportedCallError, UtilityCallError
from trio_frontend.engine.vllm import wait_started


async def answer_next(core: ScriptedCore, result: Any = None, failure: str | None = None) -> None:
    call = await core.receive_utility()
    core.answer(call[1], result, failure)


async def test_a_call_goes_out_by_name_and_its_result_comes_back() -> None:
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:

        async def serve() -> None:
            client_index, call_id, method, args = await core.receive_utility()
            assert (client_index, method, args) == (0, "sleep", [1, "abort", None, {"a": [1.5]}])
            core.answer(call_id, {"done": [True, None]})

        nursery.start_soon(serve)
        with trio.fail_after(PATIENCE):
            assert await engine.call_utility("sleep", 1, "abort", None, {"a": [1.5]}) == [{"done": [True, None]}]


async def test_every_engine_is_called_and_results_are_in_the_order_of_ranks() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(starting_engine(data_parallel_size=3))
        cores = [await stack.enter_async_context(scripted_core(engine, rank)) for rank in range(3)]
        for core in reversed(cores):
            await core.join()
        await wait_started(engine, PATIENCE)

        async def serve() -> None:
            for core in reversed(cores):
                await answer_next(core, core.rank * 10)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            with trio.fail_after(PATIENCE):
                assert await engine.call_utility("whoami") == [0, 10, 20]


async def test_answers_find_their_callers_in_whatever_order_they_come() -> None:
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:
        found: dict[str, Any] = {}

        async def call(method: str) -> None:
            found[method] = await engine.call_utility(method)

        for method in ("one", "two", "three"):
            nursery.start_soon(call, method)
        calls = [await core.receive_utility() for _ in range(3)]
        assert len({call[1] for call in calls}) == 3
        for _, call_id, method, _ in reversed(calls):
            core.answer(call_id, method.upper())
        nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
    assert found == {"one": ["ONE"], "two": ["TWO"], "three": ["THREE"]}


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("Call to sleep method failed: out of memory", UtilityCallError, "sleep failed: out of memory"),
        ("Server shutting down", UtilityCallError, "sleep failed: Server shutting down"),
        ("", UtilityCallError, "sleep failed: "),
        (
            "Call to sleep method failed: 'EngineCoreProc' object has no attribute 'sleep'",
            UnsupportedCallError,
            "the engine has no sleep",
        ),
        (
            "Call to sleep method failed: 'Worker' object has no attribute 'other'",
            UtilityCallError,
            "sleep failed: 'Worker' object has no attribute 'other'",
        ),
    ],
)
async def test_a_failure_says_which_method_and_why(failure: str, error: type[Exception], message: str) -> None:
    async with engine_with_core() as (engine, core):

        async def call() -> None:
            with pytest.raises(error) as caught:
                await engine.call_utility("sleep")
            assert str(caught.value) == message

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await answer_next(core, failure=failure)
        assert engine.health.value.serving


async def test_a_result_that_is_a_pickle_fails_the_call_and_nothing_else() -> None:
    pickled = b"\xc7\x03\x01abc"  # extension type 1
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:

        async def serve() -> None:
            _, call_id, _, _ = await core.receive_utility()
            core.send_frames(b"\x95\x00\x90\xc0\xcb" + bytes(8) + b"\x93" + bytes([call_id]) + b"\xc0\x92\xc0" + pickled)

        nursery.start_soon(serve)
        with trio.fail_after(PATIENCE), pytest.raises(UtilityCallError, match="extension type 1 is refused"):
            await engine.call_utility("pickled")
        assert engine.health.value.serving


async def test_a_call_without_an_answer_ends_after_its_timeout_and_a_late_answer_is_dropped() -> None:
    async with engine_with_core() as (engine, core):
        with pytest.raises(UtilityCallError, match=r"^slow failed: no answer from rank 0 within 0\.05 s$"):
            await engine.call_utility("slow", timeout=0.05)
        _, late, _, _ = await core.receive_utility()
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                _, call_id, _, _ = await core.receive_utility()
                core.answer(late, "late")
                core.answer(call_id, "fresh")

            nursery.start_soon(serve)
            assert await engine.call_utility("next") == ["fresh"]


async def test_the_default_timeout_is_the_engines() -> None:
    async with engine_with_core(utility_timeout=0.05) as (engine, _):
        with pytest.raises(UtilityCallError, match=r"within 0\.05 s"):
            await engine.call_utility("slow")


async def test_the_engine_that_does_not_answer_is_named() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(starting_engine(data_parallel_size=2))
        zero = await stack.enter_async_context(scripted_core(engine, 0))
        one = await stack.enter_async_context(scripted_core(engine, 1))
        await zero.join()
        await one.join()
        await wait_started(engine, PATIENCE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_next, zero)
            with pytest.raises(UtilityCallError, match="no answer from rank 1"):
                await engine.call_utility("slow", timeout=0.2)


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    async with engine_with_core() as (engine, core):
        with trio.move_on_after(0.05) as scope:
            await engine.call_utility("slow")
        assert scope.cancelled_caught
        _, call_id, _, _ = await core.receive_utility()
        core.answer(call_id, "too late")
        async with engine.generate(request()) as outputs:
            core.finish("r", [5])
            assert [output.token_ids async for batch in outputs for output in batch] == [[5]]


async def test_arguments_that_cannot_be_encoded_are_refused() -> None:
    async with engine_with_core() as (engine, _):
        with pytest.raises(ValueError, match="the arguments of sleep cannot be sent"):
            await engine.call_utility("sleep", object())


async def test_an_answer_that_nobody_asked_for_is_ignored() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        core.answer(999, "nobody's")
        core.finish("r", [5])
        assert [output.token_ids async for batch in outputs for output in batch] == [[5]]


async def test_a_call_before_the_engine_serves_is_unavailable() -> None:
    async with starting_engine() as engine:
        with pytest.raises(EngineUnavailableError, match="starting"):
            await engine.call_utility("is_sleeping")
