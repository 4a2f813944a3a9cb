"""From the arguments to what opens the engine. What an engine needs is imported when it is opened, not before."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trio_frontend.engine.base import Engine
from trio_frontend.server import OpenEngine

from .errors import UsageError
from .serve import EngineChoice

if TYPE_CHECKING:
    from trio_frontend.engine.vllm import VllmOptions

__all__ = ["opener"]


def opener(args: argparse.Namespace, choice: EngineChoice) -> OpenEngine:
    """What opens the engine that was chosen."""
    if choice.kind == "embedded":
        return partial(_embedded, args, choice.model)
    assert choice.model is not None, "choose_engine asks for one"
    return partial(_external if choice.kind == "external vLLM" else _owned, args, choice.model)


@asynccontextmanager
async def _embedded(args: argparse.Namespace, model: str | None) -> AsyncIterator[Engine]:
    from trio_frontend.engine import embedded

    async with embedded.open_engine(None if model is None else Path(model), max_logprobs=args.max_logprobs) as engine:
        yield engine


@asynccontextmanager
async def _external(args: argparse.Namespace, model: str) -> AsyncIterator[Engine]:
    from trio_frontend.engine import vllm

    async with vllm.open_engine(
        handshake_address=args.handshake_address,
        options=await _vllm_options(args, model),
        start_timeout=args.engine_start_timeout,
    ) as engine:
        yield engine


@asynccontextmanager
async def _owned(args: argparse.Namespace, model: str) -> AsyncIterator[Engine]:
    from trio_frontend.engine import vllm

    # The engine reads the model too, and so from where we do.
    same_files = [
        word
        for flag, value in (("--tokenizer", args.tokenizer), ("--hf-config-path", args.hf_config_path))
        if value is not None
        for word in (flag, value)
    ]
    async with vllm.launch_engine(
        model,
        vllm=args.vllm or "vllm",
        arguments=[*same_files, *args.passed_through],
        options=await _vllm_options(args, model),
        start_timeout=args.engine_start_timeout,
    ) as engine:
        yield engine


async def _vllm_options(args: argparse.Namespace, model: str) -> VllmOptions:
    from trio_frontend.engine.vllm import VllmOptions
    from trio_frontend.text import is_multimodal, read_config

    config = await trio.to_thread.run_sync(read_config, args.hf_config_path or model, abandon_on_cancel=True)
    try:
        return VllmOptions(
            data_parallel_size=args.data_parallel_size,
            advertise_host=args.advertise_host,
            engine_reconnect=args.engine_reconnect,
            heartbeat_timeout=args.engine_heartbeat_timeout or None,
            stall_timeout=args.stall_timeout or None,
            max_logprobs=args.max_logprobs,
            supports_multimodal=is_multimodal(config),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
