"""``vllm.Control``: what an orchestrator asks a server, and tells it.

Rules that hold here:

* A call that the engine was not started for is FAILED_PRECONDITION and names the vLLM flag; that is checked before its arguments.
* Bad arguments are INVALID_ARGUMENT, name the field and the value, and reach no engine.
* The calls and their arguments are those of ``EngineCore`` in ``vllm/v1/engine/core.py``, 0.32 and 0.33. Weight transfer runs on the
  workers, through ``collective_rpc(method, timeout, args, kwargs)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from trio_frontend.engine.base import Engine, LoraRequest
from trio_frontend.protos.vllm import control_pb2 as pb
from trio_frontend.protos.vllm.control_grpc import ControlServicer
from trio_frontend.rpc.status import StatusCode, StatusError
from trio_frontend.services.lora import LoraAdapters, LoraRegistry
from trio_frontend.services.registry import RequestRegistry
from trio_frontend.services.server_info import (
    draft_weight_updates,
    kv_event_sources,
    model_info,
    server_info,
    sleep_mode,
    weight_transfer_backend,
)
from trio_frontend.services.utilities import NO_LIMIT, Utilities

__all__ = ["ControlService"]

logger = logging.getLogger(__name__)

PAUSE_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: "abort",
    pb.PAUSE_MODE_ABORT: "abort",
    pb.PAUSE_MODE_WAIT: "wait",
    pb.PAUSE_MODE_KEEP: "keep",
}
DEFAULT_SLEEP_LEVEL = 1


class ControlService(ControlServicer):
    """The servicer. ``loras`` is also how the server loads what the operator named at the start.

    ``model_id`` is the model's path or hub name, ``served_names`` what requests may call it, the first one reported;
    ``lora_path_prefixes`` the directories from which callers may load adapters. ``request_shutdown`` begins the server's graceful
    shutdown: it is called once the answer to Shutdown is on its way, and must not block.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_id: str,
        served_names: Sequence[str],
        requests: RequestRegistry,
        loras: LoraRegistry,
        request_shutdown: Callable[[], None],
        lora_path_prefixes: Iterable[str] = (),
    ) -> None:
        self._engine = engine
        self._model_id = model_id
        self._served_names = tuple(served_names)
        self._requests = requests
        self._request_shutdown = request_shutdown
        self._utilities = Utilities(engine)
        self.loras = LoraAdapters(
            engine, loras, self._utilities, served_names=self._served_names, path_prefixes=lora_path_prefixes
        )

    # Discovery.

    async def GetServerInfo(self, input_message: pb.GetServerInfoRequest) -> pb.ServerInfo:
        return server_info(self._engine.capabilities)

    async def GetModelInfo(self, input_message: pb.GetModelInfoRequest) -> pb.ModelInfo:
        return model_info(self._engine.capabilities, self._model_id, self._served_names)

    async def GetKvEventSources(self, input_message: pb.GetKvEventSourcesRequest) -> pb.GetKvEventSourcesResponse:
        return pb.GetKvEventSourcesResponse(sources=kv_event_sources(self._engine.capabilities.engines))

    # Requests and the server itself.

    async def Abort(self, input_message: pb.AbortRequest) -> pb.AbortResponse:
        self._engine.abort(self._requests.internal_ids(input_message.request_ids))
        return pb.AbortResponse()

    async def Shutdown(self, input_message: pb.ShutdownRequest) -> pb.ShutdownResponse:
        logger.info("shutdown was requested by vllm.Control/Shutdown")
        # What it sets going runs in another task, and so after this answer was put on its way.
        self._request_shutdown()
        return pb.ShutdownResponse()

    # LoRA adapters.

    async def LoadLora(self, input_message: pb.LoadLoraRequest) -> pb.LoadLoraResponse:
        adapter = await self.loras.load(input_message.lora_name, input_message.source_path)
        return pb.LoadLoraResponse(adapter=_adapter(adapter))

    async def UnloadLora(self, input_message: pb.UnloadLoraRequest) -> pb.UnloadLoraResponse:
        adapter = await self.loras.unload(input_message.lora_name)
        return pb.UnloadLoraResponse(adapter=_adapter(adapter))

    async def ListLoras(self, input_message: pb.ListLorasRequest) -> pb.ListLorasResponse:
        return pb.ListLorasResponse(adapters=[_adapter(adapter) for adapter in self.loras.list()])

    # Pause and sleep.

    async def PauseGeneration(self, input_message: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        mode = _pause_mode(input_message.mode)
        clear_cache = input_message.clear_cache if input_message.HasField("clear_cache") else True
        async with self._utilities.change():
            # 0.33 has pause_generation, which also refuses new requests; 0.32 only pause_scheduler, which lets them wait.
            await self._utilities.call_first(
                "PauseGeneration", ("pause_generation", "pause_scheduler"), mode, clear_cache, timeout=NO_LIMIT
            )
        return pb.PauseGenerationResponse()

    async def ResumeGeneration(self, input_message: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        async with self._utilities.change():
            await self._utilities.call("ResumeGeneration", "resume_scheduler")
        return pb.ResumeGenerationResponse()

    async def IsPaused(self, input_message: pb.IsPausedRequest) -> pb.IsPausedResponse:
        return pb.IsPausedResponse(paused=await self._utilities.ask("IsPaused", "is_scheduler_paused", bool))

    async def Sleep(self, input_message: pb.SleepRequest) -> pb.SleepResponse:
        self._check_sleep_mode()
        mode = _pause_mode(input_message.mode)
        level = input_message.level if input_message.HasField("level") else DEFAULT_SLEEP_LEVEL
        async with self._utilities.change():
            await self._utilities.call("Sleep", "sleep", level, mode, timeout=NO_LIMIT)
        return pb.SleepResponse()

    async def WakeUp(self, input_message: pb.WakeUpRequest) -> pb.WakeUpResponse:
        self._check_sleep_mode()
        async with self._utilities.change():
            await self._utilities.call("WakeUp", "wake_up", list(input_message.tags) or None, timeout=NO_LIMIT)
        return pb.WakeUpResponse()

    async def IsSleeping(self, input_message: pb.IsSleepingRequest) -> pb.IsSleepingResponse:
        return pb.IsSleepingResponse(sleeping=await self._utilities.ask("IsSleeping", "is_sleeping", bool))

    # Weights.

    async def InitWeightTransferEngine(
        self, input_message: pb.InitWeightTransferEngineRequest
    ) -> pb.InitWeightTransferEngineResponse:
        self._check_weight_transfer()
        info = _json_object("init_info_json", input_message.init_info_json)
        await self._on_workers("InitWeightTransferEngine", "init_weight_transfer_engine", {"init_info": info})
        return pb.InitWeightTransferEngineResponse()

    async def StartWeightUpdate(self, input_message: pb.StartWeightUpdateRequest) -> pb.StartWeightUpdateResponse:
        self._check_weight_transfer()
        await self._on_workers("StartWeightUpdate", "start_weight_update", {})
        return pb.StartWeightUpdateResponse()

    async def StartDraftWeightUpdate(
        self, input_message: pb.StartDraftWeightUpdateRequest
    ) -> pb.StartDraftWeightUpdateResponse:
        self._check_weight_transfer()
        if not draft_weight_updates(self._engine.capabilities.engines):
            raise StatusError(
                StatusCode.FAILED_PRECONDITION,
                "there is no draft model whose weights could be updated; start vLLM with --speculative-config",
            )
        await self._on_workers("StartDraftWeightUpdate", "start_draft_weight_update", {})
        return pb.StartDraftWeightUpdateResponse()

    async def UpdateWeights(self, input_message: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        self._check_weight_transfer()
        info = _json_object("update_info_json", input_message.update_info_json)
        await self._on_workers("UpdateWeights", "update_weights", {"update_info": info})
        return pb.UpdateWeightsResponse()

    async def FinishWeightUpdate(self, input_message: pb.FinishWeightUpdateRequest) -> pb.FinishWeightUpdateResponse:
        self._check_weight_transfer()
        version = _weight_version(input_message.weight_version) if input_message.HasField("weight_version") else None
        async with self._utilities.change():
            await self._utilities.call(
                "FinishWeightUpdate", "collective_rpc", "finish_weight_update", None, [], {}, timeout=NO_LIMIT
            )
            if version is not None:
                await self._utilities.call("FinishWeightUpdate", "set_weight_version", version)
        return pb.FinishWeightUpdateResponse()

    async def UpdateWeightVersion(self, input_message: pb.UpdateWeightVersionRequest) -> pb.UpdateWeightVersionResponse:
        version = _weight_version(input_message.weight_version)
        async with self._utilities.change():
            await self._utilities.call("UpdateWeightVersion", "set_weight_version", version)
        return pb.UpdateWeightVersionResponse()

    async def GetWeightVersion(self, input_message: pb.GetWeightVersionRequest) -> pb.GetWeightVersionResponse:
        version = await self._utilities.ask("GetWeightVersion", "get_weight_version", str)
        return pb.GetWeightVersionResponse(weight_version=version)

    async def _on_workers(self, operation: str, method: str, kwargs: dict[str, Any]) -> None:
        async with self._utilities.change():
            await self._utilities.call(operation, "collective_rpc", method, None, [], kwargs, timeout=NO_LIMIT)

    def _check_sleep_mode(self) -> None:
        if not sleep_mode(self._engine.capabilities.engines):
            raise StatusError(
                StatusCode.FAILED_PRECONDITION, "sleep mode is not configured; start vLLM with --enable-sleep-mode"
            )

    def _check_weight_transfer(self) -> None:
        if not weight_transfer_backend(self._engine.capabilities.engines):
            raise StatusError(
                StatusCode.FAILED_PRECONDITION,
                "weight transfer is not configured; start vLLM with --weight-transfer-config",
            )


def _adapter(adapter: LoraRequest) -> pb.LoraAdapter:
    return pb.LoraAdapter(lora_id=adapter.id, lora_name=adapter.name, source_path=adapter.path)


def _pause_mode(mode: int) -> str:
    """vLLM's name of a PauseMode. A proto3 enum may hold any number."""
    name = PAUSE_MODES.get(mode)  # type: ignore[call-overload]
    if name is None:
        raise StatusError(StatusCode.INVALID_ARGUMENT, f"mode {mode}: invalid pause mode, it must be 0 to 3")
    return str(name)


def _weight_version(version: str) -> str:
    if not version.strip():
        raise StatusError(StatusCode.INVALID_ARGUMENT, f"weight_version {version!r}: weight_version must not be empty")
    return version


def _json_object(field: str, body: bytes) -> dict[str, Any]:
    """``body`` as an object that can go to an engine. Raises StatusError(INVALID_ARGUMENT)."""
    try:
        value = msgspec.json.decode(body)
        # what msgpack cannot carry: whole numbers beyond 64 bits
        msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise StatusError(StatusCode.INVALID_ARGUMENT, f"{field} must contain valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StatusError(StatusCode.INVALID_ARGUMENT, f"{field} must contain a JSON object, not {type(value).__name__}")
    return value
