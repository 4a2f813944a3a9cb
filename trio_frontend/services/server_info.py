"""What the engines' ready responses say of the server, as ``vllm.Control``'s messages. Pure functions.

Several engines are one server: their cache blocks add up, the shortest context counts, a feature is there if all have it, and what
describes one engine (parallelism, limits of a step, block size) is the first one's. So has it vLLM's own frontend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trio_frontend.engine.base import Capabilities, EngineInfo
from trio_frontend.protos.vllm.control_pb2 import (
    KvEventSource,
    ModelInfo,
    ParallelismInfo,
    RlCapabilities,
    ServerInfo,
)

__all__ = ["draft_weight_updates", "kv_event_sources", "model_info", "server_info", "sleep_mode", "weight_transfer_backend"]

API_VERSION = "vllm"
KV_EVENTS_ENCODING = "msgpack"
KV_EVENTS_SCHEMA_VERSION = 1


def weight_transfer_backend(engines: Sequence[EngineInfo]) -> str:
    """The backend that all engines have; empty if they have none or different ones."""
    backends = {engine.weight_transfer_backend or "" for engine in engines}
    return backends.pop() if len(backends) == 1 else ""


def sleep_mode(engines: Sequence[EngineInfo]) -> bool:
    return bool(engines) and all(engine.enable_sleep_mode for engine in engines)


def draft_weight_updates(engines: Sequence[EngineInfo]) -> bool:
    return bool(engines) and all(engine.supports_draft_weight_updates for engine in engines)


def server_info(capabilities: Capabilities) -> ServerInfo:
    engines = capabilities.engines
    if not engines:
        return ServerInfo(api_version=API_VERSION, max_model_len=capabilities.max_model_len)
    first = engines[0]
    backend = weight_transfer_backend(engines)
    attention_block_sizes = {engine.effective_attention_block_size for engine in engines}
    return ServerInfo(
        engine_version=first.vllm_version,
        api_version=API_VERSION,
        instance_id=first.instance_id,
        parallelism=ParallelismInfo(
            tensor_parallel_size=first.tensor_parallel_size,
            pipeline_parallel_size=first.pipeline_parallel_size,
            # ranks of a model without experts each report a size of 1
            data_parallel_size=len(engines),
            data_parallel_rank=first.rank,
            decode_context_parallel_size=first.decode_context_parallel_size,
            world_size=first.world_size,
            data_parallel_size_local=len(engines),
        ),
        max_model_len=min(engine.max_model_len for engine in engines),
        kv_block_size=first.block_size,
        total_kv_blocks=sum(engine.num_gpu_blocks for engine in engines),
        max_running_requests=first.max_num_seqs,
        max_batched_tokens=first.max_num_batched_tokens,
        max_loras=first.max_loras,
        rl_capabilities=RlCapabilities(
            weight_transfer_enabled=bool(backend),
            weight_transfer_backend=backend,
            sleep_mode_enabled=sleep_mode(engines),
            draft_weight_updates_enabled=draft_weight_updates(engines),
        ),
        effective_attention_block_size=attention_block_sizes.pop() if len(attention_block_sizes) == 1 else None,
    )


def model_info(capabilities: Capabilities, model_id: str, served_names: Sequence[str]) -> ModelInfo:
    """``model_id`` is the model's path or hub name; the first of ``served_names`` is the name, the others are aliases."""
    return ModelInfo(
        model_id=model_id,
        served_model_name=served_names[0],
        served_model_aliases=served_names[1:],
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=capabilities.supports_lora,
        supports_multimodal=capabilities.supports_multimodal,
    )


def kv_event_sources(engines: Sequence[EngineInfo]) -> list[KvEventSource]:
    """One for each engine that publishes its cache's events over ZeroMQ (``vllm.config.KVEventsConfig``)."""
    return [
        _kv_event_source(engine.rank, config)
        for engine in engines
        if (config := engine.kv_events_config) is not None
        and config.get("enable_kv_cache_events")
        and config.get("publisher") == "zmq"
    ]


def _kv_event_source(rank: int, config: Any) -> KvEventSource:
    return KvEventSource(
        transport=config["publisher"],
        endpoint=config.get("endpoint") or "",
        topic=config.get("topic") or "",
        replay_endpoint=config.get("replay_endpoint") or "",
        data_parallel_rank=rank,
        encoding=KV_EVENTS_ENCODING,
        schema_version=KV_EVENTS_SCHEMA_VERSION,
        buffer_steps=config.get("buffer_steps") or 0,
        hwm=config.get("hwm") or 0,
        max_queue_size=config.get("max_queue_size") or 0,
    )
