"""An engine that is being opened: it answers for the real one until that is there, and passes everything on from then.

A server can thus listen, and say NOT_SERVING, while a model loads or an engine elsewhere starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from trio_util import AsyncValue

from trio_frontend.engine.base import (
    Capabilities,
    Engine,
    EngineHealth,
    EngineRequest,
    EngineState,
    EngineUnavailableError,
    OutputStream,
)

__all__ = ["StartingEngine"]

_STARTING = "the engine is starting"


class StartingEngine(Engine):
    """Refuses everything with EngineUnavailableError until :meth:`become`; afterwards each call is the real engine's own."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._health = AsyncValue(EngineHealth(EngineState.STARTING, _STARTING))

    @property
    def opened(self) -> bool:
        return self._engine is not None

    def become(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _real(self) -> Engine:
        if self._engine is None:
            raise EngineUnavailableError(_STARTING)
        return self._engine

    @property
    def health(self) -> AsyncValue[EngineHealth]:
        return self._health if self._engine is None else self._engine.health

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_model_len=0) if self._engine is None else self._engine.capabilities

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[OutputStream]:
        return self._real.generate(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        if self._engine is not None:
            self._engine.abort(request_ids)

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        return await self._real.call_utility(method, *args, timeout=timeout)

    @property
    def live_requests(self) -> int:
        return 0 if self._engine is None else self._engine.live_requests
