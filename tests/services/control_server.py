"""``vllm.Control`` over a scripted engine, on a real socket, and a client to call it with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import trio
from google.protobuf.message import Message

from trio_frontend import rpc
from trio_frontend.client import connect
from trio_frontend.engine.base import Capabilities, EngineInfo, UnsupportedCallError
from trio_frontend.protos.vllm.control_grpc import ControlStub
from trio_frontend.services.control import ControlService
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.registry import RequestRegistry
from trio_frontend.testing.engine import ScriptedEngine

ANSWERS: dict[str, Any] = {
    "add_lora": [True],
    "collective_rpc": [[None]],
    "get_weight_version": ["v1"],
    "is_scheduler_paused": [True],
    "is_sleeping": [True],
    "pause_generation": [None],
    "remove_lora": [True],
    "resume_scheduler": [None],
    "set_weight_version": [None],
    "sleep": [None],
    "wake_up": [True],
}


class RecordingEngine(ScriptedEngine):
    """Remembers what it was told to abort."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.aborts: list[list[str]] = []

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborts.append(list(request_ids))
        super().abort(self.aborts[-1])


class ControlServer:
    """``answers`` says what each utility call returns: a list, an exception, or a function of its arguments (async or not)."""

    def __init__(self, engines: Sequence[EngineInfo], lora_path_prefixes: Sequence[str]) -> None:
        self.answers = dict(ANSWERS)
        capabilities = Capabilities(
            max_model_len=4096, engines=tuple(engines), supports_lora=all(engine.supports_lora for engine in engines)
        )
        self.engine = RecordingEngine(capabilities=capabilities, utility=self._answer)
        self.requests = RequestRegistry()
        self.loras = LoraRegistry()
        self.shutdowns = 0
        self.service = ControlService(
            self.engine,
            model_id="org/tiny",
            served_names=["tiny", "tiny-alias"],
            requests=self.requests,
            loras=self.loras,
            request_shutdown=self._shutdown,
            lora_path_prefixes=lora_path_prefixes,
        )
        self.address = ""

    async def call(self, name: str, request: Message) -> Any:
        async with connect(self.address) as channel:
            return await getattr(ControlStub(channel), name)(request)

    async def _answer(self, method: str, *arguments: Any) -> list[Any]:
        answer = self.answers.get(method, UnsupportedCallError(method))
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(*arguments)
            if inspect.isawaitable(answer):
                answer = await answer
        return list(answer)

    def _shutdown(self) -> None:
        self.shutdowns += 1


async def serve_control(
    nursery: trio.Nursery, engines: Sequence[EngineInfo], *, lora_path_prefixes: Sequence[str] = ()
) -> ControlServer:
    server = ControlServer(engines, lora_path_prefixes)
    ((host, port),) = await nursery.start(rpc.serve, [server.service])
    server.address = f"{host}:{port}"
    return server
