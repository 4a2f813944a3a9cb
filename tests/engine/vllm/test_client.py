"""Requests and their outputs over real sockets: in order, none lost, none mixed up; leaving the scope is the engine's abort."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.engine.vllm.frames import inline
from tests.engine.vllm.scripted import (
    ABORT,
    ERROR,
    LENGTH,
    PATIENCE,
    STOP,
    ScriptedCore,
    encode,
    engine_with_core,
    heard,
    request,
    scripted_core,
    starting_engine,
)
from trio_frontend.engine.base import (
    DataParallelRankError,
    EngineError,
    EngineOutput,
    EngineUnavailableError,
    FinishReason,
    OutputStream,
)
from trio_frontend.engine.vllm import wait_started


async def collect(outputs: OutputStream) -> list[EngineOutput]:
    return [output async for batch in outputs for output in batch]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(autouse=True)
async def _no_test_takes_forever() -> Any:
    with trio.fail_after(4 * PATIENCE):
        yield


# Outputs.


async def test_a_request_gets_its_tokens_and_its_finish_reason() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r", 3)) as outputs:
        add = await core.receive_add()
        assert (add[0], add[1], add[3]["max_tokens"]) == ("r", [1, 2, 3], 3)
        core.send(["r", [5]])
        core.send(["r", [6, 7], None, None, None, LENGTH])
        found = await collect(outputs)
        assert tokens(found) == [5, 6, 7]
        assert [output.finish_reason for output in found] == [None, FinishReason.LENGTH]
        assert engine.live_requests == 0


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        (STOP, None, FinishReason.STOP),
        (STOP, 42, FinishReason.STOP),
        (STOP, "words", FinishReason.STOP),
        (LENGTH, None, FinishReason.LENGTH),
        (ABORT, None, FinishReason.ABORT),
        (4, None, FinishReason.REPETITION),
    ],
)
async def test_every_finish_reason_comes_through(reason: int, stop_reason: Any, expected: FinishReason) -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        core.send(["r", [5], None, None, None, reason, stop_reason])
        (output,) = await collect(outputs)
        assert (output.finish_reason, output.stop_reason) == (expected, stop_reason)


async def test_a_message_for_many_requests_is_taken_apart() -> None:
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:
        found: dict[str, list[int]] = {}

        async def consume(request_id: str) -> None:
            async with engine.generate(request(request_id)) as outputs:
                found[request_id] = tokens(await collect(outputs))

        names = [f"r{number}" for number in range(20)]
        for name in names:
            nursery.start_soon(consume, name)
        for _ in names:
            await core.receive_add()
        for step in range(5):
            core.send(*([name, [step * 100 + number]] for number, name in enumerate(names)))
        core.send(*([name, [], None, None, None, STOP] for name in names))
        nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
    assert found == {name: [step * 100 + number for step in range(5)] for number, name in enumerate(names)}


async def test_what_waits_is_taken_in_one_batch() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        await core.receive_add()
        for token in range(10):
            core.send(["r", [token]])
        await heard(engine, core)
        assert tokens(await anext(outputs)) == list(range(10))


async def test_a_sink_takes_outputs_while_the_consumer_waits() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        sunk: list[EngineOutput] = []
        outputs.set_sink(lambda output: sunk.append(output) or True)
        async with trio.open_nursery() as nursery:
            rest: list[EngineOutput] = []

            async def consume() -> None:
                rest.extend(await collect(outputs))

            nursery.start_soon(consume)
            await trio.testing.wait_all_tasks_blocked()
            for token in range(5):
                core.send(["r", [token]])
            core.finish("r", [9])
        assert tokens(sunk) == [0, 1, 2, 3, 4]
        assert tokens(rest) == [9]


async def test_logprobs_transfer_params_and_stop_reason_come_with_their_output() -> None:
    ids, ranks = np.array([[5, 5, 8]], np.int32), np.array([1], np.int64)
    logprobs = np.array([[-0.5, -0.5, -2]], np.float32)
    wire_logprobs = [inline(ids), inline(logprobs), inline(ranks), None]
    prompt = [["int32", [2, 1], 1], ["float32", [2, 1], 2], inline(np.array([3, 4], np.int32), "int32"), None]
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        body = ["r", [5], wire_logprobs, prompt, None, STOP, 5, None, {"kv": 1}, {"ec": [2]}]
        core.send_frames(
            encode([0, [body]]), np.array([[2], [3]], np.int32).tobytes(), np.array([[-1], [-3]], np.float32).tobytes()
        )
        (output,) = await collect(outputs)
        assert output.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.logprobs.token_ids.tolist() == [[5, 5, 8]]
        assert output.logprobs.logprobs.tolist() == [[-0.5, -0.5, -2.0]]
        assert output.logprobs.ranks.tolist() == [1]
        assert output.prompt_logprobs.token_ids.tolist() == [[2], [3]]
        assert output.prompt_logprobs.logprobs.tolist() == [[-1.0], [-3.0]]
        assert output.prompt_logprobs.ranks.tolist() == [3, 4]
        assert (output.kv_transfer_params, output.ec_transfer_params) == ({"kv": 1}, {"ec": [2]})
        assert output.stop_reason == 5


async def test_outputs_without_anything_in_them_are_not_delivered() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r", 1)) as outputs:
        for _ in range(5):
            core.send(["r", []])
        core.finish("r", [5])
        assert tokens(await collect(outputs)) == [5]


async def test_outputs_for_unknown_and_finished_requests_are_ignored() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r", 5)) as outputs:
        core.send(["never heard of", [1]], ["r", [5]])
        core.send(["never heard of", [], None, None, None, ERROR])
        core.finish("r", [6])
        core.send(["r", [7]])
        core.finish("r", [8])
        assert tokens(await collect(outputs)) == [5, 6]
        assert engine.health.value.serving


async def test_a_slow_consumer_holds_nobody_up_and_loses_nothing() -> None:
    count = 500
    async with engine_with_core() as (engine, core), trio.open_nursery() as nursery:
        fast_done = trio.Event()
        found: dict[str, list[int]] = {}

        async def slow() -> None:
            async with engine.generate(request("slow", count)) as outputs:
                await fast_done.wait()
                found["slow"] = tokens(await collect(outputs))

        async def fast() -> None:
            async with engine.generate(request("fast", count)) as outputs:
                found["fast"] = tokens(await collect(outputs))
            fast_done.set()

        nursery.start_soon(slow)
        nursery.start_soon(fast)
        for _ in range(2):
            await core.receive_add()
        for token in range(count - 1):
            core.send(["slow", [token]], ["fast", [token]])
        core.send(["slow", [count - 1], None, None, None, LENGTH], ["fast", [count - 1], None, None, None, LENGTH])
    assert found == {"slow": list(range(count)), "fast": list(range(count))}


async def test_an_engine_that_sends_more_than_max_tokens_ends_the_request_and_is_told() -> None:
    async with engine_with_core() as (engine, core):
        with pytest.raises(EngineError, match="more outputs than max_tokens allows"):  # noqa: PT012
            async with engine.generate(request("r", 3)) as outputs:
                await core.receive_add()
                for token in range(10):
                    core.send(["r", [token]])
                await heard(engine, core)
                await collect(outputs)
        assert await core.receive_abort() == ["r"]


# Failures of one request.


def error_output(**error: Any) -> list[Any]:
    return ["r", [], None, None, None, ERROR, *[None] * 12, error or None]


@pytest.mark.parametrize(
    ("output", "message", "code", "retryable"),
    [
        (["r", [], None, None, None, ERROR], "engine failed during generation", None, False),
        (error_output(), "engine failed during generation", None, False),
        (error_output(code="validation_error", message="bad grammar"), "bad grammar", "validation_error", False),
        (error_output(code="engine_paused", message="paused", retryable=True), "paused", "engine_paused", True),
        (error_output(code="odd"), "odd", "odd", False),
        (
            ["r", [], None, None, None, ERROR, *[None] * 8, ["hash"]],
            "the engine's media cache lost an item",
            "mm_cache_miss",
            True,
        ),
        (["r", [], None, None, None, 77], "for a reason unknown here: 77", None, False),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
async def test_an_error_ends_the_request_after_what_was_delivered(
    output: list[Any], message: str, code: str | None, retryable: bool, before: int
) -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r", 9)) as outputs:
        await core.receive_add()
        for token in range(before):
            core.send(["r", [token]])
        core.send(output)
        found: list[EngineOutput] = []
        with pytest.raises(EngineError, match=message) as caught:  # noqa: PT012
            async for batch in outputs:
                found += batch
        assert tokens(found) == list(range(before))
        assert (caught.value.code, caught.value.retryable) == (code, retryable)
        assert engine.live_requests == 0
        assert engine.health.value.serving


async def test_tokens_that_come_with_an_error_are_delivered_before_it() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request()) as outputs:
        core.send(["r", [5], None, None, None, ERROR])
        assert tokens(await anext(outputs)) == [5]
        with pytest.raises(EngineError):
            await anext(outputs)


async def test_a_request_that_cannot_be_encoded_reaches_no_engine() -> None:
    async with engine_with_core() as (engine, core):
        bad = request("bad")
        bad.sampling.temperature = 3.0
        with pytest.raises(ValueError, match=r"temperature is 3\.0"):
            async with engine.generate(bad):
                pytest.fail("entered")
        assert engine.live_requests == 0
        async with engine.generate(request("good")):
            assert (await core.receive_add())[0] == "good"


# Aborts.


async def test_leaving_the_scope_tells_the_engine_to_stop() -> None:
    async with engine_with_core() as (engine, core):
        async with engine.generate(request("r")) as outputs:
            await core.receive_add()
            core.send(["r", [5]])
            await anext(outputs)
        assert await core.receive_abort() == ["r"]
        assert engine.live_requests == 0


async def test_leaving_the_scope_after_the_last_output_tells_nothing() -> None:
    async with engine_with_core() as (engine, core):
        async with engine.generate(request("done")) as outputs:
            await core.receive_add()
            core.finish("done", [5])
            await collect(outputs)
        async with engine.generate(request("next")):
            assert (await core.receive_add())[0] == "next"


async def test_a_cancelled_consumer_is_an_abort_while_no_token_flows() -> None:
    async with engine_with_core() as (engine, core):
        with trio.move_on_after(0.05):
            async with engine.generate(request("r")) as outputs:
                await collect(outputs)
        await core.receive_add()
        assert await core.receive_abort() == ["r"]


async def test_an_exception_in_the_scope_is_an_abort_and_comes_out_as_it_is() -> None:
    async with engine_with_core() as (engine, core):
        with pytest.raises(ZeroDivisionError):
            async with engine.generate(request("r")):
                raise ZeroDivisionError
        await core.receive_add()
        assert await core.receive_abort() == ["r"]


async def test_requests_that_end_together_share_one_abort_message() -> None:
    async with engine_with_core() as (engine, core):
        async with trio.open_nursery() as nursery:

            async def hold(request_id: str) -> None:
                async with engine.generate(request(request_id)) as outputs:
                    await collect(outputs)

            for number in range(50):
                nursery.start_soon(hold, f"r{number}")
            for _ in range(50):
                await core.receive_add()
            nursery.cancel_scope.cancel()
        assert sorted(await core.receive_abort()) == sorted(f"r{number}" for number in range(50))


async def test_abort_by_id_gives_a_last_output_after_what_was_queued() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r")) as outputs:
        await core.receive_add()
        core.send(["r", [5]])
        await heard(engine, core)
        engine.abort(["unknown", "r", "r"])
        found = await collect(outputs)
        assert tokens(found) == [5]
        assert found[-1].finish_reason is FinishReason.ABORT
        assert await core.receive_abort() == ["r"]
        assert engine.live_requests == 0


async def test_what_the_engine_still_sends_for_an_aborted_request_is_dropped() -> None:
    async with engine_with_core() as (engine, core):
        async with engine.generate(request("r")):
            await core.receive_add()
        await core.receive_abort()
        core.send(["r", [5]])
        core.finish("r", [6], ABORT)
        async with engine.generate(request("next")) as outputs:
            core.finish("next", [7])
            assert tokens(await collect(outputs)) == [7]


async def test_closing_the_engine_aborts_what_is_live_and_ends_it() -> None:
    async with AsyncExitStack() as stack:
        async with starting_engine() as engine:
            core = ScriptedCore(engine.handshake_address)
            stack.callback(core.close)
            await core.join()
            await wait_started(engine, PATIENCE)
            outputs = await stack.enter_async_context(engine.generate(request("r")))
            await core.receive_add()
        assert await core.receive_abort() == ["r"]
        with pytest.raises(EngineError, match="the engine's client was closed"):
            await anext(outputs)
        with pytest.raises(EngineUnavailableError, match="the engine's client is closed"):
            async with engine.generate(request("late")):
                pytest.fail("entered")
        assert engine.live_requests == 0


async def test_an_id_that_is_live_is_refused() -> None:
    async with engine_with_core() as (engine, core), engine.generate(request("r")) as outputs:
        with pytest.raises(ValueError, match="request_id 'r' is that of a live request"):
            async with engine.generate(request("r")):
                pytest.fail("entered")
        core.finish("r", [5])
        assert tokens(await collect(outputs)) == [5]


# Several engines, several frontends.


async def test_requests_are_spread_over_the_engines_and_answered_by_each() -> None:
    async with starting_engine(data_parallel_size=2) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one, trio.open_nursery() as nursery:
            await zero.join()
            await one.join()
            await wait_started(engine, PATIENCE)
            found: dict[str, list[int]] = {}

            async def consume(request_id: str) -> None:
                async with engine.generate(request(request_id)) as outputs:
                    found[request_id] = tokens(await collect(outputs))

            for number in range(10):
                nursery.start_soon(consume, f"r{number}")
            for core in (zero, one):
                for _ in range(5):
                    core.finish((await core.receive_add())[0], [core.rank])
    assert sorted(token for (token,) in found.values()) == [0] * 5 + [1] * 5


async def test_a_data_parallel_rank_picks_the_engine() -> None:
    async with starting_engine(data_parallel_size=2) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one:
            await zero.join()
            await one.join()
            await wait_started(engine, PATIENCE)
            for number in range(4):
                async with engine.generate(request(f"r{number}", data_parallel_rank=1)):
                    add = await one.receive_add()
                    assert (add[0], add[8]) == (f"r{number}", 1)
                assert await one.receive_abort() == [f"r{number}"]
            with pytest.raises(DataParallelRankError, match="rank 2; connected: 0, 1"):
                async with engine.generate(request(data_parallel_rank=2)):
                    pytest.fail("entered")


async def test_the_engines_own_word_decides_between_them() -> None:
    async with starting_engine(data_parallel_size=2) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one:
            await zero.join()
            await one.join()
            await wait_started(engine, PATIENCE)
            zero.send(stats={"num_running_reqs": 40, "num_waiting_reqs": 3, "kv_cache_usage": 0.9})
            one.send(stats={"num_running_reqs": 2})
            await heard(engine, zero, one)
            for number in range(5):
                async with engine.generate(request(f"r{number}")):
                    assert (await one.receive_add())[0] == f"r{number}"
                await one.receive_abort()


async def test_an_engine_that_does_not_read_refuses_further_requests_and_gets_the_aborts_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trio_frontend.engine.vllm.sockets.SEND_HWM", 2)
    async with starting_engine() as engine, scripted_core(engine) as core:
        core.receive_hwm = 1
        await core.join()
        await wait_started(engine, PATIENCE)
        async with AsyncExitStack() as stack:
            with pytest.raises(EngineUnavailableError, match="rank 0 does not read its requests"):  # noqa: PT012
                for number in range(200):
                    large = request(f"r{number}")
                    large.sampling.extra_args = {"blob": "x" * 1_000_000}
                    await stack.enter_async_context(engine.generate(large))
            sent = engine.live_requests
            assert 0 < sent < 200
        added = [(await core.receive_add())[0] for _ in range(sent)]
        assert sorted(await core.receive_abort()) == sorted(added)
        async with engine.generate(request("again")):
            assert (await core.receive_add())[0] == "again"
