"""Protects health watches: what a watcher hears of the engine and of the shutdown, and every way its stream can end."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.lifecycle.calls import NOT_SERVING, SERVICE_UNKNOWN, SERVING, StatusCode, check, failure, watching
from trio_frontend.client import open_channel
from trio_frontend.engine.base import EngineState
from trio_frontend.services.health import LIVENESS
from trio_frontend.testing import open_frontend

SERVICES = ["", "vllm.Inference", "vllm.Generate", "vllm.Control"]


@pytest.mark.parametrize("service", SERVICES)
async def test_a_failed_engine_is_told_to_the_watcher_whose_stream_stays_open(channel, engine, service) -> None:
    async with watching(channel, service) as statuses:
        assert await anext(statuses) == SERVING
        engine.set_health(EngineState.UNHEALTHY)
        assert await anext(statuses) == NOT_SERVING
        with trio.move_on_after(0.05) as quiet:
            await anext(statuses)
        assert quiet.cancelled_caught


async def test_an_engine_that_is_back_is_told_to_the_watcher(channel, engine) -> None:
    async with watching(channel) as statuses:
        assert await anext(statuses) == SERVING
        engine.set_health(EngineState.LOST)
        await wait_all_tasks_blocked()
        engine.set_health(EngineState.STARTING)
        await wait_all_tasks_blocked()
        engine.set_health(EngineState.SERVING)
        assert [await anext(statuses), await anext(statuses)] == [NOT_SERVING, SERVING]


async def test_a_stall_is_told_and_ends_when_outputs_flow(channel, engine) -> None:
    async with watching(channel) as statuses:
        assert await anext(statuses) == SERVING
        engine.set_health(EngineState.STALLED)
        assert await anext(statuses) == NOT_SERVING
        engine.set_health(EngineState.SERVING)
        assert await anext(statuses) == SERVING


async def test_a_failed_engine_leaves_the_process_alive(channel, engine) -> None:
    async with watching(channel, LIVENESS) as statuses:
        assert await anext(statuses) == SERVING
        engine.set_health(EngineState.LOST)
        await wait_all_tasks_blocked()
        assert await check(channel, LIVENESS) == SERVING
        assert await check(channel) == NOT_SERVING


@pytest.mark.parametrize("state", [EngineState.UNHEALTHY, EngineState.STALLED, EngineState.LOST])
async def test_each_change_is_logged_with_its_reason(channel, engine, caplog, state) -> None:
    caplog.set_level(logging.INFO)
    engine.set_health(state, "what happened")
    await wait_all_tasks_blocked()
    record = next(record for record in caplog.records if record.getMessage() == "health is NOT_SERVING")
    assert (record.reason, record.detail, record.levelname) == (state.value, "what happened", "WARNING")


async def test_a_watcher_that_cancels_leaves_nothing_behind(frontend, channel) -> None:
    async with watching(channel) as statuses:
        await anext(statuses)
        assert frontend.server.health.watches == 1
    await wait_all_tasks_blocked()
    assert frontend.server.health.watches == 0


async def test_a_watcher_that_disconnects_leaves_nothing_behind(frontend) -> None:
    connection = frontend.open_stream()
    async with open_channel(connection, "localhost") as channel, watching(channel) as statuses:
        await anext(statuses)
        await connection.aclose()
        assert await failure(anext(statuses)) is StatusCode.UNAVAILABLE
    await wait_all_tasks_blocked()
    assert frontend.server.health.watches == 0


async def test_a_deadline_ends_a_watch(frontend, channel, autojump_clock) -> None:
    async with watching(channel, deadline=60) as statuses:
        assert await anext(statuses) == SERVING
        assert await failure(anext(statuses)) is StatusCode.DEADLINE_EXCEEDED
    assert frontend.server.health.watches == 0


@pytest.mark.parametrize("service", [*SERVICES, LIVENESS])
async def test_a_shutdown_tells_every_watcher_not_serving_and_then_ends_its_stream_ok(
    engine, config, nursery, service
) -> None:
    async with (
        open_frontend(engine, config()) as frontend,
        frontend.connect() as channel,
        watching(channel, service) as statuses,
    ):
        assert await anext(statuses) == SERVING
        nursery.start_soon(frontend.server.shutdown)
        assert await statuses.rest() == [NOT_SERVING]


async def test_a_watch_of_an_unknown_service_stays_open_and_ends_ok_at_shutdown(engine, config, nursery) -> None:
    async with (
        open_frontend(engine, config()) as frontend,
        frontend.connect() as channel,
        watching(channel, "x") as statuses,
    ):
        assert await anext(statuses) == SERVICE_UNKNOWN
        nursery.start_soon(frontend.server.shutdown)
        assert await statuses.rest() == []


async def test_a_watch_opened_during_the_withdrawal_grace_hears_not_serving(engine, config, nursery, autojump_clock) -> None:
    async with open_frontend(engine, config(withdrawal_grace=30)) as frontend, frontend.connect() as channel:
        nursery.start_soon(frontend.server.shutdown)
        await trio.sleep(10)
        async with watching(channel) as statuses:
            assert await statuses.rest() == [NOT_SERVING]
        assert trio.current_time() >= 30


async def test_a_watcher_that_does_not_read_is_dropped_and_does_not_hold_the_shutdown(
    engine, config, autojump_clock
) -> None:
    async with open_frontend(engine, config()) as frontend:
        # A client that opens no window: HTTP/2 preface, SETTINGS with INITIAL_WINDOW_SIZE 0, a Watch request.
        connection = frontend.open_stream()
        await connection.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00"))
        await connection.send_all(_frame(1, 4, 1, _headers()) + _frame(0, 1, 1, b"\x00\x00\x00\x00\x00"))
        await wait_all_tasks_blocked()
        assert frontend.server.health.watches == 1
        begun = trio.current_time()
        await frontend.server.shutdown()
        # The last answers' time, and what rpc takes to close a connection whose client says nothing.
        assert trio.current_time() - begun < 6
        assert frontend.server.health.watches == 0


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def _headers() -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # HPACK literals without indexing, new names (RFC 7541, 6.2.2); every string is shorter than 127.
    return b"".join(b"\x00" + bytes([len(n)]) + n.encode() + bytes([len(v)]) + v.encode() for n, v in fields.items())
