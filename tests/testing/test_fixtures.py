"""Protects what the package offers to tests of apps: its fixtures, and a server in memory under an autojump clock."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_frontend import ServerConfig
from trio_frontend.client import RpcError, StatusCode
from trio_frontend.engine.base import FinishReason
from trio_frontend.protos.vllm.inference_grpc import InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest
from trio_frontend.testing import ScriptedEngine, one_token_per_step, open_frontend

pytest_plugins = ["trio_frontend.testing.fixtures"]


@pytest.fixture
def frontend_config() -> ServerConfig:
    return ServerConfig(served_model_names=("mine",), shutdown_timeout=0)


async def test_the_fixtures_are_an_engine_a_server_and_a_channel(scripted_engine, channel, nursery) -> None:
    async def answer() -> None:
        request = await scripted_engine.next_request()
        request.send([100], finish_reason=FinishReason.LENGTH)

    nursery.start_soon(answer)
    response = await InferenceStub(channel).Generate(GenerateRequest(text="Hi", model="mine"))
    assert response.outputs.num_tokens == 1


async def test_the_config_is_the_tests_own(frontend, channel) -> None:
    assert frontend.server.config.served_model_names == ("mine",)
    with pytest.raises(RpcError) as caught:
        await InferenceStub(channel).Generate(GenerateRequest(text="Hi", model="other"))
    assert caught.value.code is StatusCode.NOT_FOUND


async def test_timeouts_around_a_server_in_memory_are_kept_under_an_autojump_clock(autojump_clock, nursery) -> None:
    engine = ScriptedEngine()
    await nursery.start(engine.play, lambda request: one_token_per_step([100] * 10), 60.0)
    with trio.fail_after(700):
        async with open_frontend(engine) as frontend, frontend.connect() as channel:
            await InferenceStub(channel).Generate(GenerateRequest(text="Hi"))
    assert 600 <= trio.current_time() < 700
    nursery.cancel_scope.cancel()


async def test_a_connection_in_memory_does_not_outlive_the_block() -> None:
    async with open_frontend(ScriptedEngine()) as frontend:
        stream = frontend.open_stream()
        await trio.testing.wait_all_tasks_blocked()
    assert (await _read_all(stream)).startswith(b"\0\0")  # SETTINGS, and then the end


async def _read_all(stream: trio.abc.Stream) -> bytes:
    received = b""
    with trio.fail_after(10):
        while data := await stream.receive_some():
            received += data
    return received
