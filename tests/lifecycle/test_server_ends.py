"""Protects the end of a server, whoever asks for it: the order, what each party sees, and that nothing is left."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_frontend
from tests.lifecycle.calls import (
    NOT_SERVING,
    SERVING,
    ControlStub,
    FinishInfo,
    StatusCode,
    check,
    failure,
    generate,
    stream,
    streaming,
    watching,
)
from trio_frontend.client import connect
from trio_frontend.engine.base import Engine, FinishReason
from trio_frontend.protos.vllm.control_pb2 import ShutdownRequest
from trio_frontend.server import Server, running, serve
from trio_frontend.testing import ScriptedEngine, one_token_per_step, open_frontend
from trio_frontend.text.model_files import ModelFilesError

H = 39


def address(server: Server) -> str:
    host, port = server.addresses[0]
    return f"{host}:{port}"


# Calls in flight.


async def test_a_shutdown_lets_the_calls_in_flight_finish(engine, config, nursery, autojump_clock) -> None:
    async with open_frontend(engine, config(shutdown_timeout=100)) as frontend, frontend.connect() as channel:
        outcome = await nursery.start(stream, channel)
        request = await engine.next_request()
        nursery.start_soon(frontend.server.shutdown)
        await trio.sleep(50)
        request.send([H], finish_reason=FinishReason.LENGTH)
        await frontend.server.shutdown()
        assert (outcome.text, outcome.finish, outcome.status) == ("H", FinishInfo.LENGTH, None)
        assert 50 <= trio.current_time() < 55


async def test_a_drain_that_is_over_ends_the_rest_unavailable_and_the_engine_gets_aborts(
    engine, config, nursery, autojump_clock
) -> None:
    async with open_frontend(engine, config(shutdown_timeout=100)) as frontend, frontend.connect() as channel:
        outcome = await nursery.start(stream, channel)
        request = await engine.next_request()
        request.send([H])
        await frontend.server.shutdown()
        assert 100 <= trio.current_time() < 105
        assert (outcome.text, outcome.finish, outcome.status) == ("H", None, StatusCode.UNAVAILABLE)
        assert outcome.message == "server is shutting down"
        assert request.aborted.is_set()


async def test_a_unary_call_that_is_cut_off_is_unavailable(engine, config, nursery) -> None:
    async with open_frontend(engine, config(shutdown_timeout=0)) as frontend, frontend.connect() as channel:
        nursery.start_soon(_shut_down_when_started, engine, frontend.server)
        assert (await generate(channel)).status is StatusCode.UNAVAILABLE
        await engine.requests[0].aborted.wait()


async def _shut_down_when_started(engine: ScriptedEngine, server: Server) -> None:
    await engine.next_request()
    server.begin_shutdown("test")


async def test_hurry_skips_the_withdrawal_and_the_drain_and_keeps_the_order(engine, config, nursery, autojump_clock) -> None:
    patient = config(withdrawal_grace=1000, shutdown_timeout=1000)
    async with open_frontend(engine, patient) as frontend, frontend.connect() as channel, watching(channel) as statuses:
        outcome = await nursery.start(stream, channel)
        await engine.next_request()
        frontend.server.begin_shutdown("first")
        await trio.sleep(1)
        frontend.server.hurry("second")
        await frontend.server.shutdown()
        assert trio.current_time() < 6
        assert outcome.status is StatusCode.UNAVAILABLE
        assert await statuses.rest() == [SERVING, NOT_SERVING]


async def test_hurry_during_the_drain_skips_the_rest_of_it(engine, config, nursery, autojump_clock) -> None:
    async with open_frontend(engine, config(shutdown_timeout=1000)) as frontend, frontend.connect() as channel:
        outcome = await nursery.start(stream, channel)
        await engine.next_request()
        frontend.server.begin_shutdown("first")
        await trio.sleep(10)
        assert outcome.status is None
        frontend.server.hurry("second")
        await frontend.server.shutdown()
        assert trio.current_time() < 15


async def test_the_withdrawal_grace_serves_new_calls_while_health_says_not_serving(
    engine, config, nursery, autojump_clock
) -> None:
    async with open_frontend(engine, config(withdrawal_grace=30)) as frontend, frontend.connect() as channel:
        frontend.server.begin_shutdown("test")
        await trio.sleep(10)
        assert await check(channel) == NOT_SERVING
        async with frontend.connect() as newcomer:
            outcome = await nursery.start(stream, newcomer)
            (await engine.next_request()).send([H], finish_reason=FinishReason.LENGTH)
            await outcome.ended.wait()
        assert outcome.text == "H"
        await frontend.server.shutdown()
        assert trio.current_time() >= 30


async def test_after_the_grace_no_new_call_is_taken(engine, config, nursery, autojump_clock) -> None:
    async with open_frontend(engine, config(shutdown_timeout=100)) as frontend, frontend.connect() as channel:
        await nursery.start(stream, channel)
        request = await engine.next_request()
        frontend.server.begin_shutdown("test")
        await trio.sleep(10)
        # This client has had its GOAWAY.
        assert (await generate(channel)).status is StatusCode.UNAVAILABLE
        assert engine.requests == [request]


async def test_the_steps_of_a_shutdown_come_in_order_and_each_is_logged(engine, config, caplog, autojump_clock) -> None:
    caplog.set_level(logging.INFO, "trio_frontend.server")
    async with open_frontend(engine, config(withdrawal_grace=1)) as frontend:
        caplog.clear()
        await frontend.server.shutdown()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "shutdown begins: shutdown() was called",
        "health is NOT_SERVING",
        "still serving for 1 s, so that balancers can leave",
        "listeners close, clients are told to go, calls have 20 s to finish",
        "no call is left, 0 were cut off; 0 health watches end",
    ]
    assert caplog.records[1].reason == "server_shutdown"


# Who asks for it.


async def test_control_shutdown_is_answered_and_then_runs_the_same_way(engine, config, nursery) -> None:
    async with open_frontend(engine, config()) as frontend, frontend.connect() as channel, watching(channel) as statuses:
        await anext(statuses)
        await ControlStub(channel).Shutdown(ShutdownRequest())
        assert await statuses.rest() == [NOT_SERVING]
        await frontend.server.shutdown()


async def test_control_shutdown_is_answered_also_when_nothing_is_waited_for(engine, config) -> None:
    async with open_frontend(engine, config(shutdown_timeout=0)) as frontend, frontend.connect() as channel:
        await ControlStub(channel).Shutdown(ShutdownRequest())
        await frontend.server.shutdown()


async def test_a_cancelled_nursery_ends_in_the_same_order_without_waiting(engine, config, nursery, autojump_clock) -> None:
    outcomes = []
    async with trio.open_nursery() as app:
        server = await app.start(partial(serve, engine, config(withdrawal_grace=1000, shutdown_timeout=1000), listeners=()))
        from trio_frontend.testing.frontend import Frontend

        frontend = Frontend(server, nursery)
        channel = await _kept_connection(frontend, nursery)
        outcomes.append(await nursery.start(stream, channel))
        request = await engine.next_request()
        statuses = await nursery.start(_collect_watch, channel)
        await wait_all_tasks_blocked()
        app.cancel_scope.cancel()
    assert trio.current_time() < 6
    await outcomes[0].ended.wait()
    assert outcomes[0].status is StatusCode.UNAVAILABLE
    assert request.aborted.is_set()
    await wait_all_tasks_blocked()
    assert statuses == [SERVING, NOT_SERVING, "ended"]


async def _kept_connection(frontend, nursery):  # type: ignore[no-untyped-def]
    async def keep(task_status):  # type: ignore[no-untyped-def]
        async with frontend.connect() as channel:
            task_status.started(channel)
            await frontend.server.finished.wait()
            await wait_all_tasks_blocked()

    return await nursery.start(keep)


async def _collect_watch(channel, task_status):  # type: ignore[no-untyped-def]
    told: list[object] = []
    async with watching(channel) as statuses:
        told.append(await anext(statuses))
        task_status.started(told)
        told.extend(await statuses.rest())
    told.append("ended")


async def test_an_exception_in_the_block_ends_the_server_and_comes_out_as_it_is(engine, config, autojump_clock) -> None:
    with pytest.raises(LookupError, match="of the app"):
        async with running(engine, config(withdrawal_grace=1000)) as server:
            raise LookupError("of the app")
    assert server.finished.is_set()
    assert trio.current_time() < 6


async def test_a_cancel_scope_around_the_block_ends_the_server(engine, config, autojump_clock) -> None:
    with trio.CancelScope() as scope:
        async with running(engine, config(withdrawal_grace=1000)) as server:
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert server.finished.is_set()
    assert trio.current_time() < 6


async def test_shutting_down_twice_is_shutting_down_once(engine, config, nursery) -> None:
    async with running(engine, config()) as server:
        nursery.start_soon(server.shutdown)
        await server.shutdown()
        await server.shutdown()


async def test_a_shutdown_whose_caller_is_cancelled_goes_on(engine, config, autojump_clock) -> None:
    async with running(engine, config(withdrawal_grace=10)) as server:
        with trio.move_on_after(1):
            await server.shutdown()
        assert not server.finished.is_set()
        await server.finished.wait()
        assert 10 <= trio.current_time() < 16


# Its start.


async def test_nursery_start_returns_when_the_server_serves_and_gives_the_port(engine, config, nursery) -> None:
    server = await nursery.start(serve, engine, config())
    async with connect(address(server)) as channel:
        assert await check(channel) == SERVING
    await server.shutdown()


async def test_the_port_answers_not_serving_while_the_engine_is_opened(engine, config, nursery) -> None:
    opened = trio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Engine]:
        await opened.wait()
        yield engine

    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    nursery.start_soon(serve, slow, config(port=port))
    channel = await _connect_patiently(port, nursery)
    assert await check(channel) == NOT_SERVING
    assert await check(channel, "liveness") == SERVING
    assert (await generate(channel)).status is StatusCode.UNAVAILABLE
    async with watching(channel) as statuses:
        assert await anext(statuses) == NOT_SERVING
        opened.set()
        assert await anext(statuses) == SERVING
    nursery.cancel_scope.cancel()


async def _connect_patiently(port, nursery):  # type: ignore[no-untyped-def]
    from trio_frontend.client import RpcError

    async def keep(task_status):  # type: ignore[no-untyped-def]
        while True:
            try:
                async with connect(f"127.0.0.1:{port}") as channel:
                    task_status.started(channel)
                    await trio.sleep_forever()
            except RpcError:
                await trio.sleep(0.01)

    return await nursery.start(keep)


async def test_control_shutdown_during_the_start_ends_it(config, nursery, autojump_clock) -> None:
    @asynccontextmanager
    async def never() -> AsyncIterator[Engine]:
        await trio.sleep_forever()
        yield ScriptedEngine()

    async def call(port: int) -> None:
        async with connect(f"127.0.0.1:{port}") as channel:
            await ControlStub(channel).Shutdown(ShutdownRequest())

    from trio_frontend import rpc

    (listener,) = await rpc.listen_tcp()
    nursery.start_soon(call, listener.address[1])
    server = await nursery.start(partial(serve, never, config(), listeners=[listener]))
    await server.finished.wait()


async def test_a_cancelled_start_leaves_nothing(config) -> None:
    closed = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Engine]:
        try:
            await trio.sleep_forever()
            yield ScriptedEngine()
        finally:
            closed.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, slow, config())
        await wait_all_tasks_blocked()
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert closed == [True]


async def test_an_engine_that_does_not_open_is_raised_as_it_is_and_frees_the_port(config, nursery) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[Engine]:
        raise LookupError("no such engine")
        yield ScriptedEngine()

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with pytest.raises(LookupError, match="no such engine"):
        await serve(broken, config(port=port))
    async with running(ScriptedEngine(), config(port=port)) as server:
        assert server.addresses[0][1] == port


async def test_a_taken_port_is_an_oserror_that_names_it_and_no_engine_is_opened(config) -> None:
    def never() -> object:
        raise AssertionError("opened")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            await serve(never, config(port=port))


async def test_an_unreadable_model_is_an_error_that_names_it(engine) -> None:
    with pytest.raises(ModelFilesError, match="/no/such/model"):
        await serve(engine, trio_frontend.ServerConfig(port=0, model="/no/such/model"))


# Its surroundings.


async def test_an_engine_of_the_callers_own_stays_open(engine, config) -> None:
    async with running(engine, config()):
        pass
    async with running(engine, config()) as server, connect(address(server)) as channel, streaming(channel):
        await engine.next_request()


async def test_an_engine_that_the_server_opened_is_closed_last(config, nursery) -> None:
    engine = ScriptedEngine()
    events = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        try:
            yield engine
        finally:
            events.append(("closed", engine.live, server.running_handlers))

    async with running(opened, config(shutdown_timeout=0)) as server, connect(address(server)) as channel:
        await nursery.start(stream, channel)
        await engine.next_request()
        await server.shutdown()
    assert events == [("closed", (), 0)]


async def test_two_servers_in_one_process_end_one_without_the_other(config) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with running(engines[0], config()) as first, running(engines[1], config()) as second:
        await first.shutdown()
        async with connect(address(second)) as channel:
            assert await check(channel) == SERVING
            async with streaming(channel):
                await engines[1].next_request()
    assert engines[0].requests == []


async def test_a_server_leaves_signals_and_logging_alone(engine, config) -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    handlers = list(logging.getLogger().handlers)
    async with running(engine, config()):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
        assert logging.getLogger().handlers == handlers
        assert logging.getLogger("trio_frontend").handlers == []


async def test_a_unix_socket_is_removed_at_the_end(engine, config, tmp_path) -> None:
    path = tmp_path / "s.sock"
    async with running(engine, config(unix_socket=str(path))) as server:
        assert server.addresses == [str(path)]
        async with connect(f"unix:{path}") as channel:
            assert await check(channel) == SERVING
    assert not path.exists()


async def test_control_has_a_door_of_its_own_if_it_is_told_so(engine, config) -> None:
    async with running(engine, config(control_address=("127.0.0.1", 0))) as server:
        async with connect(address(server)) as channel:
            assert await failure(ControlStub(channel).Shutdown(ShutdownRequest())) is StatusCode.UNIMPLEMENTED
            assert await check(channel, "vllm.Control") == SERVING
        host, port = server.control_addresses[0]
        async with connect(f"{host}:{port}") as channel:
            assert (await generate(channel)).status is StatusCode.UNIMPLEMENTED
            await ControlStub(channel).Shutdown(ShutdownRequest())
        await server.finished.wait()


async def test_everything_works_under_a_mock_clock(config, autojump_clock, nursery) -> None:
    engine = ScriptedEngine()
    await nursery.start(engine.play, lambda request: one_token_per_step([H] * 5), 1.0)
    async with open_frontend(engine, config()) as frontend, frontend.connect() as channel:
        outcome = await stream(channel)
    assert outcome.text == "HHHHH"
    assert 5 <= trio.current_time() < 10
    nursery.cancel_scope.cancel()
