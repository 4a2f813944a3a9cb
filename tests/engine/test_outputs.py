"""Protects the one stream that every engine delivers through: order, bounds, the sink's fast path, and the end."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_frontend.engine.base import EngineError, EngineOutput, FinishReason
from trio_frontend.engine.outputs import RequestOutputs


def token(token_id: int) -> EngineOutput:
    return EngineOutput([token_id])


def last(token_id: int) -> EngineOutput:
    return EngineOutput([token_id], finish_reason=FinishReason.LENGTH)


def ids(batch: list[EngineOutput]) -> list[int]:
    return [token_id for output in batch for token_id in output.token_ids]


async def collect(stream: RequestOutputs) -> list[int]:
    return [token_id async for batch in stream for token_id in ids(batch)]


async def test_a_batch_is_all_that_waits_in_order() -> None:
    stream = RequestOutputs(8)
    for token_id in range(5):
        stream.put(token(token_id))
    assert ids(await stream.__anext__()) == [0, 1, 2, 3, 4]
    stream.put(last(5))
    assert ids(await stream.__anext__()) == [5]
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_a_parked_consumer_is_woken_once_for_a_whole_batch(nursery: trio.Nursery) -> None:
    stream = RequestOutputs(8)
    batches: list[list[int]] = []

    async def consume() -> None:
        async for batch in stream:
            batches.append(ids(batch))

    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    stream.put(token(1))
    stream.put(token(2))
    stream.put(last(3))
    await trio.testing.wait_all_tasks_blocked()
    assert batches == [[1, 2, 3]]


async def test_outputs_beyond_max_tokens_end_the_request_with_an_error_after_what_was_queued() -> None:
    stream = RequestOutputs(2)
    for token_id in range(4):
        stream.put(token(token_id))
    assert stream.finished
    assert ids(await stream.__anext__()) == [0, 1, 2]
    with pytest.raises(EngineError, match="more outputs than max_tokens"):
        await stream.__anext__()


async def test_there_is_room_for_an_abort_after_max_tokens_outputs() -> None:
    stream = RequestOutputs(2)
    stream.put(token(0))
    stream.put(token(1))
    stream.put(EngineOutput([], finish_reason=FinishReason.ABORT))
    assert [output.finish_reason for output in await stream.__anext__()] == [None, None, FinishReason.ABORT]


async def test_an_error_comes_after_what_was_queued_and_the_first_one_counts() -> None:
    stream = RequestOutputs(8)
    stream.put(token(7))
    stream.close_with_error(EngineError("first"))
    stream.close_with_error(EngineError("second"))
    stream.put(token(8))
    assert ids(await stream.__anext__()) == [7]
    for _ in range(2):
        with pytest.raises(EngineError, match="first"):
            await stream.__anext__()


async def test_an_error_wakes_a_parked_consumer(nursery: trio.Nursery) -> None:
    stream = RequestOutputs(8)
    failures: list[str] = []

    async def consume() -> None:
        try:
            await collect(stream)
        except EngineError as error:
            failures.append(error.message)

    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    stream.close_with_error(EngineError("gone"))
    await trio.testing.wait_all_tasks_blocked()
    assert failures == ["gone"]


async def test_an_error_after_the_last_output_changes_nothing() -> None:
    stream = RequestOutputs(8)
    stream.put(last(1))
    stream.close_with_error(EngineError("late"))
    assert await collect(stream) == [1]


async def test_a_parked_consumer_sleeps_on_while_its_sink_takes_the_outputs(nursery: trio.Nursery) -> None:
    stream = RequestOutputs(8)
    sunk: list[int] = []
    queued: list[int] = []

    def sink(output: EngineOutput) -> bool:
        sunk.extend(output.token_ids)
        return True

    async def consume() -> None:
        queued.extend(await collect(stream))

    stream.set_sink(sink)
    stream.put(token(0))  # before the consumer is parked: queued
    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    stream.put(token(1))
    stream.put(token(2))
    stream.put(last(3))  # never offered
    await trio.testing.wait_all_tasks_blocked()
    assert sunk == [1, 2]
    assert queued == [0, 3]


async def test_what_the_sink_refuses_is_queued_and_nothing_overtakes_it(nursery: trio.Nursery) -> None:
    stream = RequestOutputs(8)
    offered: list[int] = []
    queued: list[int] = []

    def sink(output: EngineOutput) -> bool:
        offered.extend(output.token_ids)
        return output.token_ids[0] != 1

    async def consume() -> None:
        queued.extend(await collect(stream))

    stream.set_sink(sink)
    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    stream.put(token(0))
    stream.put(token(1))  # refused: the consumer is woken, but has not run yet
    stream.put(token(2))
    await trio.testing.wait_all_tasks_blocked()
    assert (offered, queued) == ([0, 1], [])
    stream.put(last(3))
    await trio.testing.wait_all_tasks_blocked()
    assert queued == [1, 2, 3]


async def test_a_sink_that_raises_ends_its_own_request_only(nursery: trio.Nursery) -> None:
    stream = RequestOutputs(8)

    def sink(output: EngineOutput) -> bool:
        raise ZeroDivisionError

    failures: list[str] = []

    async def consume() -> None:
        try:
            await collect(stream)
        except EngineError as error:
            failures.append(error.message)

    stream.set_sink(sink)
    nursery.start_soon(consume)
    await trio.testing.wait_all_tasks_blocked()
    stream.put(token(0))
    await trio.testing.wait_all_tasks_blocked()
    assert failures == ["the consumer of the outputs failed"]


async def test_a_cancelled_wait_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    stream = RequestOutputs(8)
    with trio.move_on_after(1):
        await stream.__anext__()
    stream.put(token(1))
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.__anext__()
    stream.put(last(2))
    assert await collect(stream) == [1, 2]


async def test_a_closed_stream_frees_what_was_queued_and_drops_the_rest() -> None:
    stream = RequestOutputs(8)
    stream.put(token(1))
    stream.close()
    stream.put(token(2))
    stream.close_with_error(EngineError("late"))
    stream.close()
    assert stream.finished
    with pytest.raises(trio.ClosedResourceError):
        await stream.__anext__()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["put", "run", "turn"]), max_size=30), st.lists(st.booleans(), max_size=30), st.booleans())
def test_sink_and_channel_together_deliver_every_output_once_and_in_order(
    steps: list[str], takes: list[bool], fail: bool
) -> None:
    async def main() -> None:
        stream = RequestOutputs(40)
        delivered: list[int] = []
        answers = iter(takes)
        ended: list[bool] = []

        def sink(output: EngineOutput) -> bool:
            if next(answers, True):
                delivered.extend(output.token_ids)
                return True
            return False

        async def consume() -> None:
            try:
                async for batch in stream:
                    assert batch
                    delivered.extend(ids(batch))
                    await trio.lowlevel.checkpoint()  # so that outputs queue while the consumer is busy
            except EngineError:
                ended.append(True)
            else:
                ended.append(False)

        stream.set_sink(sink)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume)
            count = 0
            for step in steps:
                if step == "put":
                    stream.put(token(count))
                    count += 1
                elif step == "turn":
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.testing.wait_all_tasks_blocked()
            if fail:
                stream.close_with_error(EngineError())
            else:
                stream.put(last(count))
                count += 1
        assert delivered == list(range(count))
        assert ended == [fail]

    trio.run(main)
