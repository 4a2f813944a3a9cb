"""Protects against a cancel at any moment: start, calls and shutdown are run over and over, cancelled one step later each time."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio
import trio.testing

from tests.rpc.harness import BIDI, Client, framed, service, value
from tests.rpc.http2 import wire
from trio_frontend import rpc


class CancelAtStep(trio.abc.Instrument):
    """Cancels ``scope`` when the tasks of the run have made ``step`` steps."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.scope: trio.CancelScope | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if not self.left and self.scope is not None:
            self.scope.cancel()


class Watched:
    """A handler that knows whether it is running."""

    running = 0

    async def __call__(self, messages: rpc.Call, request: rpc.Call) -> None:
        self.running += 1
        try:
            async for message in messages:
                await request.send(message)
                await request.send(value(b"x" * 5_000))
        finally:
            self.running -= 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def cancelled_at_every_step(scenario: Callable[[rpc.Server], Awaitable[None]], most: int = 2000) -> int:
    """Run ``scenario`` with a cancel at its 1st, 2nd, ... step until it gets through. Returns how many steps that took."""
    trio.run(trio.lowlevel.checkpoint)
    before = descriptors()
    for step in range(1, most):
        watched = Watched()
        server = rpc.Server([service(watched, BIDI)])
        instrument = CancelAtStep(step)

        async def main(server: rpc.Server = server, instrument: CancelAtStep = instrument) -> bool:
            with trio.CancelScope() as scope:
                instrument.scope = scope
                await scenario(server)
            return not scope.cancelled_caught

        through = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.001), instruments=[instrument])
        assert (watched.running, server.live_connections, server.running_handlers) == (0, 0, 0), f"left at step {step}"
        assert descriptors() == before, f"a descriptor is left at step {step}"
        if through and instrument.left > 0:
            return step
    raise AssertionError(f"not through after {most} steps")


async def two_calls(client: Client) -> None:
    await client.start(INITIAL_WINDOW_SIZE=6_000)
    stream_id = await client.open(end=False)
    await client.send(wire.data(stream_id, framed(b"a")))
    await client.until(lambda: len(client.responses[stream_id].messages) == 2)
    await client.send(wire.data(stream_id, framed(b"b")))  # stalls
    await client.send(wire.window_update(stream_id, 10_000), wire.data(stream_id, b"", wire.END_STREAM))
    await client.response(stream_id)
    await client.open(b"left open", end=False)


async def over_tcp(server: rpc.Server) -> None:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp())
        async with await trio.open_tcp_stream(*address) as stream:
            client = Client(stream)
            await two_calls(client)
            nursery.start_soon(server.shutdown, 1)
            await client.read_to_the_end()


async def over_memory(server: rpc.Server) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_stream, theirs)
        client = Client(ours)
        await two_calls(client)
        await client.aclose()


def test_a_cancel_at_any_step_of_a_server_in_memory_leaves_nothing() -> None:
    assert cancelled_at_every_step(over_memory) > 50


def test_a_cancel_at_any_step_of_a_server_on_a_port_leaves_nothing() -> None:
    assert cancelled_at_every_step(over_tcp) > 50


def test_a_client_that_leaves_at_any_step_leaves_nothing() -> None:
    for step in range(1, 120):
        watched = Watched()
        instrument = CancelAtStep(step)

        async def main(watched: Watched = watched, instrument: CancelAtStep = instrument) -> None:
            server = rpc.Server([service(watched, BIDI)])
            async with trio.open_nursery() as nursery:
                [address] = await nursery.start(server.serve, await rpc.listen_tcp())
                with trio.CancelScope() as instrument.scope:
                    async with await trio.open_tcp_stream(*address) as stream:
                        await two_calls(Client(stream))
                with trio.fail_after(5):
                    while server.live_connections or watched.running or server.running_handlers:
                        await trio.testing.wait_all_tasks_blocked()
                await server.shutdown(0)

        trio.run(main, instruments=[instrument])
