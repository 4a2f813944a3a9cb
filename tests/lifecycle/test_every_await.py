"""Protects cancellation at every await: of a request, on both its sides, of a server's start, and of its end. Nothing may be left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from purerpc.grpclib.status import Status, StatusCode
from trio.testing import wait_all_tasks_blocked

from tests.lifecycle.calls import generate, prompt, stream, watching
from tests.lifecycle.steps import Trigger, cancel_at_every_step, every_task
from trio_frontend.client import Channel, connect
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import Engine
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest
from trio_frontend.server import Server, running
from trio_frontend.testing import Frontend, ScriptedEngine, one_token_per_step, open_frontend

H, BANG = 39, 0

CALLS = {
    "unary": (generate, prompt()),
    "stream": (stream, prompt()),
    "two sequences": (stream, prompt(n=2)),
    "stop string": (stream, prompt(stop=("!",))),
    "long prompt": (stream, prompt("x" * 1000)),
}
call_kinds = pytest.mark.parametrize("kind", CALLS)


def check_nothing_is_left(engine: ScriptedEngine, server: Server) -> None:
    assert engine.live == ()
    assert all(request.outputs.finished for request in engine.requests)
    assert server.running_handlers == 0
    assert len(server.requests) == 0
    assert server.health.watches == 0


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[tuple[Frontend, Channel, ScriptedEngine]]:
    """A server in memory whose engine answers four tokens, one each second; what is left of a call is looked at in the end."""
    engine = ScriptedEngine()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.play, lambda request: one_token_per_step([H, H, BANG, H]), 1.0)
        async with open_frontend(engine, config) as frontend, frontend.connect() as channel:
            yield frontend, channel, engine
            # The client's RST_STREAM, and what the server makes of it, take some turns of the loop; no time.
            await wait_all_tasks_blocked()
            check_nothing_is_left(engine, frontend.server)
        nursery.cancel_scope.cancel()


@call_kinds
def test_a_caller_may_be_cancelled_at_its_every_await(config: Callable[..., ServerConfig], kind: str) -> None:
    call, request = CALLS[kind]

    async def scenario(trigger: Trigger) -> None:
        async with serving(config()) as (_, channel, _engine):
            ours = trio.lowlevel.current_task()
            with trio.CancelScope() as scope:
                trigger.arm(scope.cancel, lambda task: task is ours)
                await call(channel, request)
            trigger.disarm()

    # A unary caller waits once, for its answer.
    assert cancel_at_every_step(scenario) >= (1 if call is generate else 4)


@call_kinds
def test_a_handler_may_be_cancelled_at_its_every_await(config: Callable[..., ServerConfig], kind: str) -> None:
    call, request = CALLS[kind]

    async def scenario(trigger: Trigger) -> None:
        async with serving(config()) as (frontend, channel, _):
            (door, _listeners), *_others = frontend.server._doors
            cancelled = []

            def cancel() -> None:
                for live in door._in_flight(but=()):
                    live.end(Status(StatusCode.CANCELLED, "cancelled by the test"))
                    cancelled.append(live)

            trigger.arm(cancel, lambda task: task.name.startswith("/vllm.Inference/"))
            outcome = await call(channel, request)
            trigger.disarm()
            # After its last step there is nothing left to cancel.
            assert outcome.status is (StatusCode.CANCELLED if cancelled else None)

    # Outputs that are not the last go past a waiting handler, so it waits less often than there are tokens.
    assert cancel_at_every_step(scenario) >= 2


@pytest.mark.parametrize(
    "kinds", [["unary", "stream"], pytest.param(list(CALLS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_a_connection_may_be_lost_at_every_step_of_everything(config: Callable[..., ServerConfig], kinds: list[str]) -> None:
    async def scenario(trigger: Trigger) -> None:
        async with serving(config()) as (frontend, _, _engine), trio.open_nursery() as nursery:
            with trio.CancelScope() as connection:

                async def use() -> None:
                    async with frontend.connect() as channel, trio.open_nursery() as calls:
                        for kind in kinds:
                            call, request = CALLS[kind]
                            calls.start_soon(call, channel, request)

                trigger.arm(connection.cancel, every_task)
                await use()
            trigger.disarm()
            nursery.cancel_scope.cancel()

    assert cancel_at_every_step(scenario) > 10 * len(kinds)


@asynccontextmanager
async def engine_with_awaits(engine: ScriptedEngine, events: list[str]) -> AsyncIterator[Engine]:
    """Opening it takes a few awaits, closing it too; that it is closed is seen in ``events``."""
    async with trio.open_nursery() as nursery:
        await trio.sleep(1)
        events.append("opening")
        try:
            await trio.sleep(1)
            nursery.start_soon(engine.play, lambda request: one_token_per_step([H, H, H]), 1.0)
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1)
            events.append("closed")
            nursery.cancel_scope.cancel()


def test_a_server_may_be_cancelled_at_every_step_of_its_life(config: Callable[..., ServerConfig]) -> None:
    """From before its listeners are bound to after its engine is closed, with a call and a watch over a real socket."""

    async def scenario(trigger: Trigger) -> None:
        engine, events, servers = ScriptedEngine(), [], []

        async def client(server: Server) -> None:
            host, port = server.addresses[0]
            async with connect(f"{host}:{port}") as channel, watching(channel) as statuses:
                await anext(statuses)
                await stream(channel, GenerateRequest(text="x"))

        with trio.CancelScope() as scope:
            trigger.arm(scope.cancel, every_task)
            settings = config(withdrawal_grace=1, shutdown_timeout=1)
            async with running(partial(engine_with_awaits, engine, events), settings) as server:
                servers.append(server)
                await client(server)
        trigger.disarm()
        assert events in ([], ["opening", "closed"])
        for server in servers:
            assert server.finished.is_set()
            check_nothing_is_left(engine, server)

    assert cancel_at_every_step(scenario) > 100


def test_a_shutdown_may_be_cancelled_at_its_every_step(config: Callable[..., ServerConfig]) -> None:
    async def scenario(trigger: Trigger) -> None:
        engine = ScriptedEngine()
        with trio.CancelScope() as scope:
            async with (
                open_frontend(engine, config(withdrawal_grace=1, shutdown_timeout=1)) as frontend,
                frontend.connect() as channel,
                trio.open_nursery() as nursery,
            ):
                outcome = await nursery.start(stream, channel)
                await engine.next_request()
                trigger.arm(scope.cancel, every_task)
                await frontend.server.shutdown()
                await outcome.ended.wait()
        trigger.disarm()
        assert frontend.server.finished.is_set()
        check_nothing_is_left(engine, frontend.server)

    assert cancel_at_every_step(scenario) > 10
