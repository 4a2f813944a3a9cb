"""Protects what a server does before it says SERVING, and what it then answers to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.lifecycle.calls import NOT_SERVING, SERVING, ControlStub, StatusCode, check, generate, prompt, streaming
from trio_frontend import rpc
from trio_frontend.client import connect
from trio_frontend.config import LoraModule
from trio_frontend.engine.base import Capabilities, Engine, EngineInfo, EngineState
from trio_frontend.protos.vllm.control_pb2 import GetModelInfoRequest, ShutdownRequest
from trio_frontend.rpc import StatusError
from trio_frontend.server import serve
from trio_frontend.testing import ScriptedEngine, open_frontend

LORA = Capabilities(max_model_len=2048, engines=(EngineInfo(max_model_len=2048, supports_lora=True),), supports_lora=True)


async def test_lora_adapters_are_loaded_before_it_serves_and_can_be_named(config) -> None:
    def load(method: str, *arguments: object) -> list[bool]:
        assert method == "add_lora"
        assert not frontends
        return [True]

    frontends: list[object] = []
    engine = ScriptedEngine(capabilities=LORA, utility=load)
    modules = (LoraModule("first", "/adapters/1"), LoraModule("second", "/adapters/2"))
    async with open_frontend(engine, config(lora_modules=modules)) as frontend:
        frontends.append(frontend)
        async with frontend.connect() as channel, streaming(channel, prompt(lora_name="second")):
            request = await engine.next_request()
    assert [arguments[0][::2] for _, arguments in engine.utility_calls] == [
        ["first", "/adapters/1"],
        ["second", "/adapters/2"],
    ]
    assert request.request.lora is not None
    assert request.request.lora.name == "second"


async def test_an_adapter_that_cannot_be_loaded_ends_the_start_and_says_which(config) -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        yield ScriptedEngine(capabilities=LORA, utility=lambda method, *_: [False])

    with pytest.raises(StatusError, match="'broken'"):
        async with open_frontend(opened, config(lora_modules=(LoraModule("broken", "/adapters/1"),))):
            pass


async def test_an_engine_that_is_open_and_not_yet_ready_is_waited_for(engine, config) -> None:
    engine.set_health(EngineState.STARTING)
    async with open_frontend(engine, config()) as frontend, frontend.connect() as channel:
        assert await check(channel) == NOT_SERVING
        engine.set_health(EngineState.SERVING)
        await wait_all_tasks_blocked()
        assert await check(channel) == SERVING


async def test_it_answers_to_its_served_names_and_to_no_other(engine, config) -> None:
    async with (
        open_frontend(engine, config(served_model_names=("main", "alias"))) as frontend,
        frontend.connect() as channel,
    ):
        for name in ("", "main", "alias"):
            async with streaming(channel, prompt(model=name)):
                await engine.next_request()
        assert (await generate(channel, prompt(model="other"))).status is StatusCode.NOT_FOUND
        info = await ControlStub(channel).GetModelInfo(GetModelInfoRequest())
        assert info.model_id == frontend.server.config.model


async def test_without_names_it_answers_to_the_models_own(engine, config, model) -> None:
    async with open_frontend(engine, config()) as frontend:
        assert frontend.server.served_model_names == (model,)


async def test_a_shutdown_while_adapters_load_gives_the_start_up(config, nursery) -> None:
    loading = trio.Event()

    async def never(method: str, *_: object) -> list[bool]:
        loading.set()
        await trio.sleep_forever()
        return [True]

    async def shut_down(port: int) -> None:
        await loading.wait()
        async with connect(f"127.0.0.1:{port}") as channel:
            await ControlStub(channel).Shutdown(ShutdownRequest())

    (listener,) = await rpc.listen_tcp()
    nursery.start_soon(shut_down, listener.address[1])
    engine = ScriptedEngine(capabilities=LORA, utility=never)
    settings = config(lora_modules=(LoraModule("slow", "/adapters/1"),))
    server = await nursery.start(partial(serve, engine, settings, listeners=[listener]))
    await server.finished.wait()
    assert not server.started.is_set()
