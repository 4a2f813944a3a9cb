"""kill -9 of the engine under a whole server: INTERNAL, NOT_SERVING and UNAVAILABLE within a second, and the server serves the next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trio

from tests.engine.vllm.test_kill import MOCK_ENGINE
from tests.lifecycle.calls import NOT_SERVING, SERVING, Outcome, StatusCode, check, generate, prompt, stream, watching
from trio_frontend.client import Channel
from trio_frontend.config import ServerConfig
from trio_frontend.engine.vllm import open_engine
from trio_frontend.testing import Frontend, open_frontend

pytestmark = pytest.mark.process

STREAMS = 50
PROMPTLY = 1.0
PATIENCE = 20.0


@contextmanager
def mock_engine(address: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(MOCK_ENGINE), "--handshake", address, "--step-ms", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def kill_under_streams(frontend: Frontend, channel: Channel, process: subprocess.Popen[bytes]) -> None:
    with trio.fail_after(PATIENCE):
        async with watching(channel) as statuses, trio.open_nursery() as nursery:
            assert await anext(statuses) == SERVING
            long = prompt(max_tokens=4000)
            outcomes: list[Outcome] = [await nursery.start(stream, channel, long) for _ in range(STREAMS)]
            while not all(outcome.text for outcome in outcomes):  # noqa: ASYNC110
                await trio.sleep(0.01)
            process.kill()
            with trio.fail_after(PROMPTLY):
                assert await anext(statuses) == NOT_SERVING
                for outcome in outcomes:
                    await outcome.ended.wait()
    assert {outcome.status for outcome in outcomes} == {StatusCode.INTERNAL}
    assert (await generate(channel)).status is StatusCode.UNAVAILABLE
    assert frontend.server.engine.live_requests == 0


async def wait_serving(channel: Channel) -> None:
    with trio.fail_after(PATIENCE):
        while await check(channel) != SERVING:  # noqa: ASYNC110
            await trio.sleep(0.02)


async def test_ten_kills_in_a_row_with_fifty_streams_each() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    opener = partial(open_engine, handshake_address=address, start_timeout=PATIENCE)
    config = ServerConfig(port=0, on_engine_death="stay")
    with mock_engine(address) as process:
        async with open_frontend(opener, config) as frontend, frontend.connect() as channel:
            await kill_under_streams(frontend, channel, process)
            tasks = trio.lowlevel.current_statistics().tasks_living
            descriptors = len(os.listdir("/proc/self/fd"))
            for _ in range(9):
                with mock_engine(address) as again:
                    await wait_serving(channel)
                    assert len((await generate(channel)).text) > 0
                    await kill_under_streams(frontend, channel, again)
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            assert len(os.listdir("/proc/self/fd")) == descriptors
