"""A client of vLLM engine cores: ZeroMQ and MessagePack, from Trio, without vLLM.

:func:`open_engine` for an engine that was started elsewhere, :func:`launch_engine` for one that is started here.
"""

from __future__ import annotations

from trio_frontend.engine.vllm.client import MissingStep, VllmEngine, VllmOptions
from trio_frontend.engine.vllm.opening import (
    EngineStartError,
    join_engines,
    launch_engine,
    open_engine,
    start_engine,
    wait_started,
)
from trio_frontend.engine.vllm.process import VllmNotFoundError
from trio_frontend.engine.vllm.sockets import Addresses

__all__ = [
    "Addresses",
    "EngineStartError",
    "MissingStep",
    "VllmEngine",
    "VllmNotFoundError",
    "VllmOptions",
    "join_engines",
    "launch_engine",
    "open_engine",
    "start_engine",
    "wait_started",
]
