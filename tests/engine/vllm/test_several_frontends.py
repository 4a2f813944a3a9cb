"""Several frontend processes share the engines: each by its own addresses and index, and none hears the other's answers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from tests.engine.vllm.scripted import PATIENCE, ScriptedCore, request, scripted_core, starting_engine, until
from trio_frontend.engine.base import EngineState
from trio_frontend.engine.vllm import (
    Addresses,
    EngineStartError,
    VllmEngine,
    VllmOptions,
    join_engines,
    start_engine,
    wait_started,
)

BRIEFLY = 0.1
"""Seconds to let something arrive that must change nothing."""


def free_addresses(count: int = 1) -> tuple[Addresses, ...]:
    with FreePorts(2 * count) as ports:
        return tuple(
            Addresses(f"tcp://127.0.0.1:{ports[2 * rank]}", f"tcp://127.0.0.1:{ports[2 * rank + 1]}")
            for rank in range(count)
        )


class FreePorts:
    """Ports that were free a moment ago."""

    def __init__(self, count: int) -> None:
        self._sockets = [socket.socket() for _ in range(count)]

    def __enter__(self) -> list[int]:
        for free in self._sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in self._sockets]

    def __exit__(self, *_: object) -> None:
        for free in self._sockets:
            free.close()


@asynccontextmanager
async def two_frontends(first_index: int = 0, reconnect: bool = True) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """One that does the handshake, and one that joins."""
    addresses = free_addresses()
    options = VllmOptions(client_index=first_index, other_frontends=(addresses,))
    async with start_engine(handshake_address="tcp://127.0.0.1:*", options=options) as first:
        joined = VllmOptions(client_index=1 - first_index, engine_reconnect=reconnect)
        async with join_engines(addresses, options=joined) as second:
            yield first, second


async def answered(engine: VllmEngine, core: ScriptedCore, index: int, request_id: str) -> list[int]:
    """A request of the frontend ``index``, answered on the output of that index."""
    with trio.fail_after(PATIENCE):
        async with engine.generate(request(request_id)) as outputs:
            inputs, core.inputs = core.inputs, [core.inputs[index]]
            add = await core.receive_add()
            core.inputs = inputs
            assert (add[0], add[11]) == (request_id, index)
            core.outputs[add[11]].send(core.encoded([request_id, [index], None, None, None, 1]))
            return [token for batch in [batch async for batch in outputs] for output in batch for token in output.token_ids]


@pytest.mark.parametrize("first_index", [0, 1])
async def test_each_frontend_gets_the_answers_to_its_own_requests(first_index: int) -> None:
    async with two_frontends(first_index) as (first, second), scripted_core(first) as core:
        await core.join()
        await wait_started(first, PATIENCE)
        await wait_started(second, PATIENCE)
        assert len(core.addresses["inputs"]) == len(core.addresses["outputs"]) == 2
        assert second.capabilities.max_model_len == first.capabilities.max_model_len == 2048
        for number in range(3):
            assert await answered(first, core, first_index, f"a{number}") == [first_index]
            assert await answered(second, core, 1 - first_index, f"b{number}") == [1 - first_index]


async def test_both_see_the_engines_death_and_its_return() -> None:
    async with two_frontends() as (first, second):
        for life in range(3):
            async with scripted_core(first) as core:
                await core.join()
                with trio.fail_after(PATIENCE):
                    for engine in (first, second):
                        await engine.health.wait_value(lambda health: health.serving)
                assert await answered(second, core, 1, f"life {life}") == [1]
                core.die()
                with trio.fail_after(PATIENCE):
                    for engine in (first, second):
                        await engine.health.wait_value(lambda health: health.state is EngineState.LOST)
                # An engine takes seconds to come back, by which time its addresses have been bound anew.
                await until(lambda: second._lives[0].starting)


async def test_without_reconnect_a_joined_engine_is_not_taken_in_again() -> None:
    async with two_frontends(reconnect=False) as (first, second), scripted_core(first) as core:
        await core.join()
        await wait_started(first, PATIENCE)
        await wait_started(second, PATIENCE)
        core.die()
        with trio.fail_after(PATIENCE):
            await first.health.wait_value(lambda health: health.state is EngineState.LOST)
        async with scripted_core(first) as again:
            await again.join()
            with trio.fail_after(PATIENCE):
                await first.health.wait_value(lambda health: health.serving)
            await trio.sleep(BRIEFLY)
            assert second.health.value.state is EngineState.LOST


async def test_what_a_joining_frontend_waits_for_is_said() -> None:
    addresses = free_addresses(2)
    async with join_engines(addresses, options=VllmOptions(data_parallel_size=2, client_index=1)) as engine:
        with pytest.raises(
            EngineStartError, match=f"not every engine joined at {addresses[0].input}, .* rank 1: ready response"
        ):
            await wait_started(engine, 0.1)


async def test_addresses_must_be_one_pair_for_each_engine() -> None:
    with pytest.raises(ValueError, match="there are 1 pairs of addresses for 2 engines"):
        async with join_engines(free_addresses(), options=VllmOptions(data_parallel_size=2)):
            pytest.fail("entered")
    with pytest.raises(ValueError, match="other_frontends has 1 pairs of addresses for 2 engines"):
        VllmOptions(data_parallel_size=2, other_frontends=(free_addresses(),))


async def test_an_index_without_addresses_of_the_others_is_refused() -> None:
    with pytest.raises(ValueError, match="client_index is 1, and other_frontends are fewer"):
        async with starting_engine(client_index=1):
            pytest.fail("entered")


async def test_an_address_that_is_taken_is_named_and_nothing_stays_open() -> None:
    addresses = free_addresses(2)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(join_engines(addresses[1:]))
        with pytest.raises(OSError, match=f"cannot bind {addresses[1].input}"):
            async with join_engines(addresses, options=VllmOptions(data_parallel_size=2)):
                pytest.fail("entered")
    async with join_engines(addresses, options=VllmOptions(data_parallel_size=2)):
        pass
