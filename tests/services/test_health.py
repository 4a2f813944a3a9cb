"""Protects the health protocol: what Check, List and Watch say, each change once, and what an idle watch costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack

import purerpc
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_frontend.engine.base import EngineState
from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from trio_frontend.services.health import LIVENESS, HealthService
from trio_frontend.testing import ScriptedEngine, open_frontend

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
INFERENCE = "vllm.Inference"


class Watcher:
    """The far end of a watch: what it was told, and a gate that holds it back when it is slow."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.ended = trio.Event()
        self.ready_to_receive = trio.Event()
        self.ready_to_receive.set()

    async def send(self, message: HealthCheckResponse) -> None:
        await self.ready_to_receive.wait()
        self.told.append(message.status)

    async def watch(self, health: HealthService, service: str = "") -> None:
        await health.Watch(HealthCheckRequest(service=service), self)
        self.ended.set()


@pytest.fixture
def health() -> HealthService:
    return HealthService([INFERENCE])


@pytest.fixture
def watch(nursery: trio.Nursery, health: HealthService) -> Callable[..., Watcher]:
    def start(service: str = "") -> Watcher:
        watcher = Watcher()
        nursery.start_soon(watcher.watch, health, service)
        return watcher

    return start


async def check(health: HealthService, service: str = "") -> int:
    return (await health.Check(HealthCheckRequest(service=service))).status


async def test_a_new_server_is_alive_and_not_ready(health: HealthService) -> None:
    assert await check(health) == NOT_SERVING
    assert await check(health, INFERENCE) == NOT_SERVING
    assert await check(health, LIVENESS) == SERVING


async def test_check_of_an_unknown_service_is_not_found_and_names_it(health: HealthService) -> None:
    with pytest.raises(purerpc.NotFoundError) as caught:
        await check(health, "vllm.Nothing")
    assert "vllm.Nothing" in caught.value.status.status_message


async def test_list_has_every_service_with_its_status(health: HealthService) -> None:
    health.set_readiness(SERVING)
    health.set("other", NOT_SERVING)
    answer = await health.List(HealthListRequest())
    assert {name: each.status for name, each in answer.statuses.items()} == {
        "": SERVING,
        INFERENCE: SERVING,
        LIVENESS: SERVING,
        "other": NOT_SERVING,
    }


async def test_a_watcher_is_told_the_present_status_at_once_and_each_change_once(health, watch) -> None:
    watcher = watch()
    await wait_all_tasks_blocked()
    for status in (SERVING, SERVING, NOT_SERVING, SERVING):
        health.set_readiness(status)
        await wait_all_tasks_blocked()
    assert watcher.told == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]


async def test_a_watcher_hears_nothing_of_other_services(health, watch) -> None:
    watcher = watch(LIVENESS)
    await wait_all_tasks_blocked()
    health.set_readiness(SERVING)
    health.set("other", SERVING)
    await wait_all_tasks_blocked()
    assert watcher.told == [SERVING]


async def test_a_slow_watcher_gets_the_newest_status_and_not_what_was_over(health, watch) -> None:
    watcher = watch()
    await wait_all_tasks_blocked()
    watcher.ready_to_receive = trio.Event()
    health.set_readiness(SERVING)
    await wait_all_tasks_blocked()
    for status in (NOT_SERVING, SERVING, NOT_SERVING):
        health.set_readiness(status)
    watcher.ready_to_receive.set()
    await wait_all_tasks_blocked()
    assert watcher.told == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_change_that_is_taken_back_before_a_watcher_could_see_it_is_not_told(health, watch) -> None:
    watcher = watch()
    await wait_all_tasks_blocked()
    health.set_readiness(SERVING)
    health.set_readiness(NOT_SERVING)
    await wait_all_tasks_blocked()
    assert watcher.told == [NOT_SERVING]


async def test_a_watch_of_an_unknown_service_stays_open_and_hears_when_it_appears(health, watch) -> None:
    watcher = watch("vllm.Later")
    await wait_all_tasks_blocked()
    assert not watcher.ended.is_set()
    health.set("vllm.Later", SERVING)
    await wait_all_tasks_blocked()
    assert watcher.told == [SERVICE_UNKNOWN, SERVING]


@pytest.mark.parametrize("service", ["", INFERENCE, LIVENESS])
async def test_at_the_end_every_watcher_is_told_not_serving_and_then_its_stream_ends(health, watch, service) -> None:
    health.set_readiness(SERVING)
    watcher = watch(service)
    await wait_all_tasks_blocked()
    health.end_watches()
    await watcher.ended.wait()
    assert watcher.told == [SERVING, NOT_SERVING]
    assert health.watches == 0


async def test_a_watch_of_an_unknown_service_ends_too(health, watch) -> None:
    watcher = watch("vllm.Later")
    await wait_all_tasks_blocked()
    health.end_watches()
    await watcher.ended.wait()
    assert watcher.told == [SERVICE_UNKNOWN]


async def test_a_watch_opened_after_the_end_is_told_not_serving_and_ends(health, watch) -> None:
    health.end_watches()
    watcher = watch()
    await watcher.ended.wait()
    assert watcher.told == [NOT_SERVING]


async def test_nothing_changes_after_the_end(health: HealthService) -> None:
    health.end_watches()
    health.set_readiness(SERVING)
    health.set(LIVENESS, SERVING)
    assert await check(health) == NOT_SERVING
    assert await check(health, LIVENESS) == NOT_SERVING


async def test_a_cancelled_watch_leaves_nothing_behind(health: HealthService) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Watcher().watch, health)
        await wait_all_tasks_blocked()
        assert health.watches == 1
        nursery.cancel_scope.cancel()
    assert health.watches == 0
    assert not health._board._level_results


async def test_ten_thousand_idle_watches_cost_memory_only_and_hear_a_change(health, watch) -> None:
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    tracemalloc.start()
    watchers = [watch() for _ in range(10_000)]
    await wait_all_tasks_blocked()
    size, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One wait queue for all of them, no task of their own beside the call's, and a few KB each (the task itself included).
    assert len(health._board._level_results) == 1
    assert trio.lowlevel.current_statistics().tasks_living - tasks_before == 10_000
    assert size / 10_000 < 8_192
    # Idle means idle: nothing wakes up while nothing changes.
    steps = StepCount()
    trio.lowlevel.add_instrument(steps)
    await wait_all_tasks_blocked()
    trio.lowlevel.remove_instrument(steps)
    assert steps.count < 10
    health.set_readiness(SERVING)
    await wait_all_tasks_blocked()
    assert all(watcher.told == [NOT_SERVING, SERVING] for watcher in watchers)
    health.end_watches()
    await wait_all_tasks_blocked()
    assert health.watches == 0


class StepCount(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@pytest.mark.slow
async def test_ten_thousand_idle_watches_over_connections_cost_memory_and_no_wake_up(autojump_clock) -> None:
    """The same through the whole server: ten connections of a thousand watches each."""
    engine = ScriptedEngine()
    async with open_frontend(engine) as frontend, AsyncExitStack() as stack:
        watches = []
        for _ in range(10):
            channel = await stack.enter_async_context(frontend.connect())
            method = HealthStub(channel).Watch
            for _ in range(1000):
                changes = await stack.enter_async_context(channel.stream(method, HealthCheckRequest()))
                watches.append(changes)
        for changes in watches:
            assert (await anext(changes)).status == SERVING
        assert frontend.server.health.watches == 10_000
        assert len(frontend.server.health._board._level_results) == 1
        steps = StepCount()
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(30)
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 100
        engine.set_health(EngineState.LOST)
        for changes in watches:
            assert (await anext(changes)).status == NOT_SERVING
