"""kill -9, SIGSTOP and restarts of real engine processes: seen within a second, over for every request, and no trace afterwards."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
import trio.testing

from tests.engine.vllm.scripted import PATIENCE, request, starting_engine, until
from trio_frontend.engine.base import EngineError, EngineState, EngineUnavailableError, FinishReason
from trio_frontend.engine.vllm import VllmEngine, wait_started
from trio_frontend.engine.vllm.endpoints import bound_to_this_host, is_this_host

pytestmark = pytest.mark.process

MOCK_ENGINE = pathlib.Path(__file__).parents[3] / "benchmarks" / "mock_engine.py"
PROMPTLY = 1.0
STREAMS = 50


@contextmanager
def mock_engine(engine: VllmEngine, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(MOCK_ENGINE), "--handshake", engine.handshake_address, "--step-ms", "2", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_serving(engine: VllmEngine) -> None:
    with trio.fail_after(4 * PATIENCE):
        await engine.health.wait_value(lambda health: health.serving)


@asynccontextmanager
async def live_streams(engine: VllmEngine, outcomes: list[str]) -> AsyncIterator[None]:
    """STREAMS requests that run, each with outputs already; their ends are in ``outcomes`` afterwards."""
    running = 0
    all_running = trio.Event()

    async def stream(number: int) -> None:
        nonlocal running
        try:
            async with engine.generate(request(f"r{number}", 8000)) as outputs:
                await anext(outputs)
                running += 1
                if running == STREAMS:
                    all_running.set()
                async for _ in outputs:
                    pass
        except EngineError:
            outcomes.append("error")
        else:
            outcomes.append("end")

    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(stream, number)
        with trio.fail_after(PATIENCE):
            await all_running.wait()
        yield
        nursery.cancel_scope.deadline = trio.current_time() + PROMPTLY


async def kill_and_come_back(engine: VllmEngine) -> None:
    with mock_engine(engine) as process:
        await wait_serving(engine)
        outcomes: list[str] = []
        async with live_streams(engine, outcomes):
            process.kill()
            with trio.fail_after(PROMPTLY):
                await engine.health.wait_value(lambda health: not health.serving)
        assert outcomes == ["error"] * STREAMS
        assert engine.health.value.state is EngineState.LOST
        assert engine.live_requests == 0
        with pytest.raises(EngineUnavailableError):
            async with engine.generate(request("late")):
                pytest.fail("entered")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_ten_kills_with_fifty_live_streams_and_nothing_is_left_of_them() -> None:
    async with starting_engine(stall_timeout=30) as engine:
        await kill_and_come_back(engine)  # what stays for good is there after the first
        await until(lambda: engine._lives[0]._sockets.input.closed)
        await trio.testing.wait_all_tasks_blocked()
        tasks, descriptors = trio.lowlevel.current_statistics().tasks_living, open_descriptors()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(9):
            await kill_and_come_back(engine)
        await until(lambda: engine._lives[0]._sockets.input.closed)
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert open_descriptors() == descriptors
        assert after - before < 100_000, f"{after - before} bytes more after nine lives"


async def test_a_process_that_answers_no_heartbeat_is_lost_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were on another host: there, a stopped process and a vanished host look the same."""
    monkeypatch.setattr("trio_frontend.engine.vllm.client.is_this_host", lambda peer: False)
    monkeypatch.setattr("trio_frontend.engine.vllm.client.bound_to_this_host", lambda address: False)
    async with starting_engine() as engine:
        with mock_engine(engine) as process:
            await wait_serving(engine)
            outcomes: list[str] = []
            async with live_streams(engine, outcomes):
                process.send_signal(signal.SIGSTOP)
                with trio.fail_after(PROMPTLY):
                    await engine.health.wait_value(lambda health: health.state is EngineState.LOST)
            assert outcomes == ["error"] * STREAMS


async def test_an_engine_on_this_host_that_is_held_up_for_seconds_is_not_lost() -> None:
    async with starting_engine() as engine:
        with mock_engine(engine) as process:
            await wait_serving(engine)
            async with engine.generate(request("r", 2000)) as outputs:
                await anext(outputs)
                process.send_signal(signal.SIGSTOP)
                with trio.move_on_after(2.5):
                    await engine.health.wait_value(lambda health: not health.serving)
                    pytest.fail(f"it was called {engine.health.value}")
                process.send_signal(signal.SIGCONT)
                with trio.fail_after(4 * PATIENCE):
                    assert [output.finish_reason async for batch in outputs for output in batch][-1] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.9.9.9:5570", True),
        ("tcp://[::1]:*", True),
        ("tcp://localhost:5570", True),
        ("ipc:///run/engine", True),
        ("tcp://0.0.0.0:5570", False),
        ("tcp://*:5570", False),
        ("tcp://10.0.0.1:5570", False),
    ],
)
def test_which_addresses_only_this_host_can_reach(address: str, here: bool) -> None:
    assert bound_to_this_host(address) == here


def test_a_peer_is_of_this_host_if_its_address_is_ours() -> None:
    assert is_this_host("127.0.0.1")
    assert is_this_host("::ffff:127.0.0.1")
    assert not is_this_host("203.0.113.1")


async def test_a_busy_engine_is_not_taken_for_a_vanished_one() -> None:
    async with starting_engine() as engine:
        with mock_engine(engine, "--load-s", "2"):  # it sleeps while its connections are open already
            await wait_started(engine, 4 * PATIENCE)
            with trio.move_on_after(2):
                await engine.health.wait_value(lambda health: not health.serving)
            assert engine.health.value.serving


async def test_an_engine_that_dies_in_the_middle_of_a_step_ends_every_request() -> None:
    async with starting_engine() as engine:
        with mock_engine(engine, "--die-after", "20"):
            await wait_serving(engine)
            outcomes: list[str] = []
            async with live_streams(engine, outcomes):
                pass
            assert outcomes == ["error"] * STREAMS


async def test_an_error_step_ends_its_requests_and_the_engine_goes_on() -> None:
    async with starting_engine() as engine:
        with mock_engine(engine, "--error-after", "20"):
            await wait_serving(engine)
            outcomes: list[str] = []
            async with live_streams(engine, outcomes):
                pass
            assert outcomes == ["error"] * STREAMS
            async with engine.generate(request("short", 3)) as outputs:
                assert sum([len(output.token_ids) async for batch in outputs for output in batch]) == 3
