"""The calls of ``vllm.Control`` behind the operator's commands, and how their answers are printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from trio_frontend.client import Channel
from trio_frontend.protos.vllm import control_pb2 as pb
from trio_frontend.protos.vllm.control_grpc import ControlStub

__all__ = ["COMMANDS"]


async def info(args: argparse.Namespace, channel: Channel) -> int:
    stub = ControlStub(channel)
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    events = await stub.GetKvEventSources(pb.GetKvEventSourcesRequest())
    if args.json:
        print(
            json.dumps({"model": _fields(model), "server": _fields(server), "kv_event_sources": _fields(events)["sources"]})
        )
    else:
        print("\n".join(_info_lines(model, server, events)))
    return 0


def _info_lines(model: pb.ModelInfo, server: pb.ServerInfo, events: pb.GetKvEventSourcesResponse) -> list[str]:
    names = ", ".join([model.served_model_name, *model.served_model_aliases])
    parallelism, training = server.parallelism, server.rl_capabilities
    features = [
        ("LoRA" + (f" (up to {server.max_loras} at once)" if server.max_loras else ""), model.supports_lora),
        ("media", model.supports_multimodal),
        ("sleep", training.sleep_mode_enabled),
        (f"weight transfer ({training.weight_transfer_backend})", training.weight_transfer_enabled),
        ("draft weight updates", training.draft_weight_updates_enabled),
    ]
    # The embedded engine's grows with each sequence and has no blocks.
    cache = (
        [f"KV cache       {server.total_kv_blocks} blocks of {server.kv_block_size} tokens"]
        if server.total_kv_blocks
        else []
    )
    lines = [
        f"model          {model.model_id}",
        f"served as      {names}",
        f"engine         {server.engine_version or 'unknown'}, instance {server.instance_id or 'unknown'}",
        f"engines        {parallelism.data_parallel_size} (tensor {parallelism.tensor_parallel_size}, "
        f"pipeline {parallelism.pipeline_parallel_size}, devices {parallelism.world_size} each)",
        f"context        {server.max_model_len} tokens",
        *cache,
        f"at once        {server.max_running_requests} requests, {server.max_batched_tokens} tokens a step and engine",
        f"features       {', '.join(name for name, present in features if present) or 'none'}",
    ]
    lines += [f"KV events      rank {source.data_parallel_rank}: {source.endpoint}" for source in events.sources]
    return lines


async def abort(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).Abort(pb.AbortRequest(request_ids=args.request_ids))
    return _print(args, answer, "the engine was told; ids that are not running were passed over")


async def lora_list(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).ListLoras(pb.ListLorasRequest())
    rows = [f"{adapter.lora_id}\t{adapter.lora_name}\t{adapter.source_path}" for adapter in answer.adapters]
    return _print(args, answer, "\n".join(rows) or "no adapters are loaded")


async def lora_load(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).LoadLora(pb.LoadLoraRequest(lora_name=args.name, source_path=args.source))
    return _print(args, answer, f"{answer.adapter.lora_name} is loaded (id {answer.adapter.lora_id})")


async def lora_unload(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).UnloadLora(pb.UnloadLoraRequest(lora_name=args.name))
    return _print(args, answer, f"{answer.adapter.lora_name} is unloaded")


async def pause(args: argparse.Namespace, channel: Channel) -> int:
    request = pb.PauseGenerationRequest(mode=f"PAUSE_MODE_{args.mode.upper()}", clear_cache=not args.keep_cache)
    return _print(args, await ControlStub(channel).PauseGeneration(request), "generation is paused")


async def resume(args: argparse.Namespace, channel: Channel) -> int:
    return _print(args, await ControlStub(channel).ResumeGeneration(pb.ResumeGenerationRequest()), "generation goes on")


async def sleep(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).Sleep(pb.SleepRequest(level=args.level, mode=f"PAUSE_MODE_{args.mode.upper()}"))
    return _print(args, answer, f"the engine sleeps at level {args.level}")


async def wake(args: argparse.Namespace, channel: Channel) -> int:
    answer = await ControlStub(channel).WakeUp(pb.WakeUpRequest(tags=args.tags))
    return _print(args, answer, f"awake: {', '.join(args.tags)}" if args.tags else "the engine is awake")


async def weights_version(args: argparse.Namespace, channel: Channel) -> int:
    stub = ControlStub(channel)
    if args.version is None:
        present = await stub.GetWeightVersion(pb.GetWeightVersionRequest())
        return _print(args, present, present.weight_version)
    answer = await stub.UpdateWeightVersion(pb.UpdateWeightVersionRequest(weight_version=args.version))
    return _print(args, answer, f"the weights are called {args.version}")


def _print(args: argparse.Namespace, answer: Message, text: str) -> int:
    print(json.dumps(_fields(answer)) if args.json else text)
    return 0


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


COMMANDS: dict[str, Callable[[argparse.Namespace, Channel], Awaitable[int]]] = {
    "info": info,
    "abort": abort,
    "lora list": lora_list,
    "lora load": lora_load,
    "lora unload": lora_unload,
    "pause": pause,
    "resume": resume,
    "sleep": sleep,
    "wake": wake,
    "weights version": weights_version,
}
