"""vLLM's gRPC API, served from Trio.

::

    server = await nursery.start(trio_frontend.serve, embedded.open_engine, trio_frontend.ServerConfig(port=0))

:func:`serve` and :func:`running` serve an engine, :class:`ServerConfig` says how. :func:`open_engine` is a client of vLLM engines
for anyone, without a server; what an engine is, is in :mod:`trio_frontend.engine.base`. :mod:`trio_frontend.testing` is for tests,
:mod:`trio_frontend.client` calls a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import trio_frontend.h2_names  # noqa: F401 - before purerpc, whoever imports it

if TYPE_CHECKING:
    from trio_frontend.config import ConfigError, LoraModule, ServerConfig, TlsConfig
    from trio_frontend.engine.base import (
        Capabilities,
        Engine,
        EngineError,
        EngineHealth,
        EngineInfo,
        EngineOutput,
        EngineRequest,
        EngineState,
        EngineUnavailableError,
        FinishReason,
        SamplingParams,
        StructuredOutput,
    )
    from trio_frontend.engine.vllm import open_engine
    from trio_frontend.server import EngineDiedError, OpenEngine, Server, running, serve

__all__ = [
    "Capabilities",
    "ConfigError",
    "Engine",
    "EngineDiedError",
    "EngineError",
    "EngineHealth",
    "EngineInfo",
    "EngineOutput",
    "EngineRequest",
    "EngineState",
    "EngineUnavailableError",
    "FinishReason",
    "LoraModule",
    "OpenEngine",
    "SamplingParams",
    "Server",
    "ServerConfig",
    "StructuredOutput",
    "TlsConfig",
    "open_engine",
    "running",
    "serve",
]

# Imported when they are asked for: the command line's --help needs none of them.
_HOMES = {
    "trio_frontend.config": ("ConfigError", "LoraModule", "ServerConfig", "TlsConfig"),
    "trio_frontend.engine.vllm": ("open_engine",),
    "trio_frontend.server": ("EngineDiedError", "OpenEngine", "Server", "running", "serve"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "trio_frontend.engine.base")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
