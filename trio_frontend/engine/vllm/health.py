"""How the health of engine cores is seen and joined: one life's connections, the state of all ranks, the stall watch.

Rules that hold here:

* A failure is that of one life of one engine. It stays until a new life of that rank serves; nothing else ends it.
* The health of all is the first failure in time, then what still starts, then what stalls, then SERVING.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Final

import trio
import zmq
from trio_util import AsyncValue

from trio_frontend.engine.base import EngineHealth, EngineState
from trio_frontend.engine.vllm.transport import MonitorEvent

__all__ = ["Activity", "HealthBoard", "PeerWatch", "watch_stall"]

logger = logging.getLogger(__name__)

SERVING: Final = EngineHealth(EngineState.SERVING)


class PeerWatch:
    """Tells from a bound socket's monitor events whether the engine's own connection went.

    Events carry a file descriptor and no identity, and anyone can connect to a port. ``engine_fd`` is the connection that a
    message of the engine came by, once one has come; before that, the engine is gone when fewer connections are left than have
    passed ZeroMQ's handshake (a port scanner passes none).
    """

    def __init__(self) -> None:
        self.engine_fd: int | None = None
        self._accepted: set[int] = set()
        self._greeted = 0

    @property
    def connected(self) -> bool:
        """A ZeroMQ peer has been there."""
        return self._greeted > 0

    def gone(self, event: MonitorEvent) -> bool:
        """Take ``event`` in; True if it is the loss of the engine's connection."""
        if event.kind == zmq.EVENT_ACCEPTED:
            self._accepted.add(event.fd)
        elif event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greeted += 1
        elif event.kind == zmq.EVENT_DISCONNECTED and event.fd in self._accepted:
            self._accepted.discard(event.fd)
            if self.engine_fd is not None:
                return event.fd == self.engine_fd
            return len(self._accepted) < self._greeted
        return False


class HealthBoard:
    """The states of all ranks, joined into one AsyncValue for those who watch."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._serving = dict.fromkeys(ranks, False)
        self._failures: dict[int, EngineHealth] = {}
        self._stalled: dict[int, str] = {}
        self.value: AsyncValue[EngineHealth] = AsyncValue(self._joined())

    def serving(self, rank: int) -> None:
        """A life of ``rank`` serves. What an earlier one failed of is over."""
        self._serving[rank] = True
        self._failures.pop(rank, None)
        self._stalled.pop(rank, None)
        self._publish()

    def failed(self, rank: int, state: EngineState, detail: str) -> None:
        self._serving[rank] = False
        self._stalled.pop(rank, None)
        self._failures.setdefault(rank, EngineHealth(state, f"rank {rank}: {detail}"))
        self._publish()

    def stalled(self, rank: int, detail: str) -> None:
        if self._serving[rank]:
            self._stalled[rank] = f"rank {rank}: {detail}"
            self._publish()

    def flowing(self, rank: int) -> None:
        if self._stalled.pop(rank, None) is not None:
            self._publish()

    def _publish(self) -> None:
        health = self._joined()
        before = self.value.value
        if health == before:
            return
        if health.serving or health.state is EngineState.STARTING:
            logger.info("engine health: %s -> %s %s", before.state.value, health.state.value, health.detail)
        else:
            logger.error("engine health: %s -> %s: %s", before.state.value, health.state.value, health.detail)
        self.value.value = health

    def _joined(self) -> EngineHealth:
        for failure in self._failures.values():
            return failure
        starting = [rank for rank, serving in self._serving.items() if not serving]
        if starting:
            return EngineHealth(EngineState.STARTING, f"waiting for rank {', '.join(map(str, starting))}")
        for detail in self._stalled.values():
            return EngineHealth(EngineState.STALLED, detail)
        return SERVING


class Activity:
    """When an engine that has requests last brought an output: what the stall watch looks at.

    ``busy``: the first request after none; ``idle``: the last one is gone; ``output``: the engine brought some.
    """

    __slots__ = ("_changed", "_watched", "has_requests", "last_output")

    def __init__(self) -> None:
        self.has_requests = False
        self.last_output = -math.inf
        self._changed = trio.Event()
        self._watched = False

    def busy(self, now: float) -> None:
        self.has_requests = True
        self.last_output = now
        self._wake()

    def idle(self) -> None:
        self.has_requests = False
        self._wake()

    def output(self, now: float) -> None:
        self.last_output = now
        if self._watched:
            self._wake()

    def _wake(self) -> None:
        if self._watched:
            self._watched = False
            self._changed.set()

    async def changed(self) -> None:
        self._watched = True
        self._changed = trio.Event()
        await self._changed.wait()


async def watch_stall(
    activity: Activity, timeout: float, on_stalled: Callable[[str], None], on_flowing: Callable[[], None]
) -> None:
    """Call ``on_stalled`` when there are requests and no output came for ``timeout`` seconds.

    ``on_flowing`` follows when one comes, or when no request is left that could bring one: else an engine whose stuck requests
    were all given up would never be asked again.
    """
    while True:
        if not activity.has_requests:
            await activity.changed()
            continue
        since = activity.last_output
        if trio.current_time() < since + timeout:
            await trio.sleep_until(since + timeout)
            continue
        on_stalled(f"requests are running and no output came for {timeout:g} s")
        while activity.has_requests and activity.last_output == since:
            await activity.changed()
        on_flowing()
