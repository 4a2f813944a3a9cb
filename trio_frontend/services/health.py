"""``grpc.health.v1.Health``: is this server ready, is it alive, and each change of that, to whoever watches.

Rules that hold here (the gRPC health checking protocol, grpc/doc/health-checking.md):

* A watcher gets the present status at once, then each change once. A slow one misses what was already over when it could
  be told: the newest status wins.
* Check of an unknown service is NOT_FOUND; Watch of one says SERVICE_UNKNOWN and stays open, for the name may yet appear.
* Ready and alive are different things. ``""`` and the services say ready; ``liveness`` is SERVING while the process can answer.
* At the end every watcher is told NOT_SERVING, and then its stream ends with OK.

All statuses are one immutable board in one AsyncValue, so a change of many services is one change. A watch is the call's own
task waiting on that value: watchers that saw the same status of the same service share one wait queue, and an idle watch
costs the memory of its call and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import purerpc
from trio_util import AsyncValue

from trio_frontend.protos.grpc.health.v1.health_grpc import HealthServicer
from trio_frontend.protos.grpc.health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

__all__ = ["LIVENESS", "OVERALL", "HealthService"]

OVERALL = ""
"""The server as a whole: ready for calls."""
LIVENESS = "liveness"
"""The process can answer. A failed engine leaves it SERVING, so that no one kills a server that waits for its engine."""

ServingStatus = HealthCheckResponse.ServingStatus


class _Outgoing(Protocol):
    """What a watch needs of its call."""

    async def send(self, message: HealthCheckResponse) -> None: ...


@dataclass(frozen=True, slots=True)
class _Board:
    statuses: Mapping[str, ServingStatus]
    ended: bool = False

    def status(self, service: str) -> ServingStatus:
        return self.statuses.get(service, HealthCheckResponse.SERVICE_UNKNOWN)


@dataclass(frozen=True, slots=True)
class _News:
    """There is something to tell a watcher of ``service`` that has ``seen`` this status. Equal ones share a wait queue."""

    service: str
    seen: ServingStatus

    def __call__(self, board: _Board) -> bool:
        return board.ended or board.status(self.service) != self.seen


class HealthService(HealthServicer):
    """The servicer, and its inner side: who knows how things are calls :meth:`set_readiness` and :meth:`end_watches`.

    ``services`` are the full names that share the server's readiness; they begin as NOT_SERVING.
    """

    def __init__(self, services: Iterable[str] = ()) -> None:
        self._ready_names = (OVERALL, *services)
        statuses = dict.fromkeys(self._ready_names, HealthCheckResponse.NOT_SERVING)
        self._board: AsyncValue[_Board] = AsyncValue(_Board({**statuses, LIVENESS: HealthCheckResponse.SERVING}))
        self._watches = 0

    @property
    def watches(self) -> int:
        """Watches open now."""
        return self._watches

    def status(self, service: str = OVERALL) -> ServingStatus:
        """The status as Watch tells it: SERVICE_UNKNOWN for a name that is not there."""
        board: _Board = self._board.value
        return board.status(service)

    def set(self, service: str, status: ServingStatus) -> None:
        """Set one service's status, known before or not. After :meth:`end_watches` nothing changes any more."""
        self._change({service: status})

    def set_readiness(self, status: ServingStatus) -> None:
        """Set the server's status and that of each service it was made with, in one change."""
        self._change(dict.fromkeys(self._ready_names, status))

    def end_watches(self) -> None:
        """Everything is NOT_SERVING, for good; each watcher is told, and its stream ends. Does not wait for them."""
        self._change(dict.fromkeys(self._board.value.statuses, HealthCheckResponse.NOT_SERVING))
        self._board.value = replace(self._board.value, ended=True)

    def _change(self, statuses: Mapping[str, ServingStatus]) -> None:
        board = self._board.value
        if not board.ended:
            self._board.value = replace(board, statuses={**board.statuses, **statuses})

    # The methods of the protocol.

    async def Check(self, input_message: HealthCheckRequest) -> HealthCheckResponse:
        status = self.status(input_message.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise purerpc.NotFoundError(f"unknown service {input_message.service!r}")
        return HealthCheckResponse(status=status)

    async def List(self, input_message: HealthListRequest) -> HealthListResponse:
        statuses = self._board.value.statuses
        return HealthListResponse(statuses={name: HealthCheckResponse(status=status) for name, status in statuses.items()})

    async def Watch(self, input_message: HealthCheckRequest, request: _Outgoing) -> None:
        service = input_message.service
        seen: ServingStatus | None = None
        self._watches += 1
        try:
            while True:
                board: _Board = self._board.value
                status = board.status(service)
                if status != seen:
                    await request.send(HealthCheckResponse(status=status))
                    seen = status
                elif board.ended:
                    return
                else:
                    await self._board.wait_value(_News(service, status))
        finally:
            self._watches -= 1
