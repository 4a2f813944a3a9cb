"""From the arguments to what opens the engine."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from trio_frontend.engine.base import Engine

from .serve import EngineChoice

__all__ = ["opener"]


def opener(args: argparse.Namespace, choice: EngineChoice) -> Callable[[], AbstractAsyncContextManager[Engine]]:
    """What opens the engine that was chosen. Nothing of it is imported before it is called."""
    opened = {"embedded": _embedded, "external vLLM": _external, "owned vLLM": _owned}[choice.kind]
    return lambda: opened(args, choice)


@asynccontextmanager
async def _embedded(args: argparse.Namespace, choice: EngineChoice) -> AsyncIterator[Engine]:
    from trio_frontend.engine import embedded

    path = None if choice.model is None else Path(choice.model)
    async with embedded.open_engine(path, max_logprobs=args.max_logprobs) as engine:
        yield engine
