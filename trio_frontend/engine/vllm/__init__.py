"""A client of vLLM engine cores: ZeroMQ and MessagePack, from Trio, without vLLM."""

from __future__ import annotations

from trio_frontend.engine.vllm.client import MissingStep, VllmEngine, VllmOptions
from trio_frontend.engine.vllm.opening import EngineStartError, open_engine, start_engine, wait_started

__all__ = ["EngineStartError", "MissingStep", "VllmEngine", "VllmOptions", "open_engine", "start_engine", "wait_started"]
