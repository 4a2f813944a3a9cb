"""A small model in this process, on ONNX Runtime: what runs when no other engine is named."""

from __future__ import annotations

from trio_frontend.engine.embedded.engine import EmbeddedEngine, open_engine, run_engine
from trio_frontend.engine.embedded.loading import SHIPPED_MODEL, LoadedModel, UnreadableModelError, load_model

__all__ = [
    "SHIPPED_MODEL",
    "EmbeddedEngine",
    "LoadedModel",
    "UnreadableModelError",
    "load_model",
    "open_engine",
    "run_engine",
]
