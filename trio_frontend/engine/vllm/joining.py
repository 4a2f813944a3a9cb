"""Engines whose handshake another process does: one of several frontends, or a launcher, has told them our addresses.

Each rank meets us at a pair of addresses of its own. It says its ready response there and is in; when it is lost, the pair is
bound again for the next one. Without a handshake there is no telling a restarted engine from one whose network came back:
what an engine says of requests that are not of the present life is ignored, as always.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Final

import trio

from trio_frontend.engine.vllm.connection import EngineConnection
from trio_frontend.engine.vllm.sockets import Addresses

__all__ = ["Joining"]

logger = logging.getLogger(__name__)

REBIND_TIMEOUT: Final = 5.0
"""Seconds in which an address that we have just closed must be free again: ZeroMQ closes sockets in its own thread."""


class Joining:
    """The addresses, by rank, and whoever joins there. ``run`` is its task.

    ``open_life(rank, addresses)`` makes a connection that is bound and not running. ``reconnect`` False: each rank has one life.
    """

    strangers: Sequence[str] = ()

    def __init__(
        self,
        addresses: Sequence[Addresses],
        open_life: Callable[[int, Addresses], EngineConnection],
        *,
        reconnect: bool,
    ) -> None:
        self._open_life = open_life
        self._reconnect = reconnect
        self._addresses = addresses
        self.address = ", ".join(pair.input for pair in addresses)
        self._lives: list[EngineConnection] = []
        try:
            for rank, pair in enumerate(addresses):
                self._lives.append(open_life(rank, pair))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for life in self._lives:
            life.close()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for life in self._lives:
                nursery.start_soon(self._keep, life)

    def life_ended(self, rank: int) -> None:
        """Nobody waits here: ``run`` binds the addresses anew."""

    async def _keep(self, life: EngineConnection) -> None:
        rank = life.rank
        while True:
            await life.run()
            if not self._reconnect or life.failure is None:
                return
            life = await self._reopen(rank)

    async def _reopen(self, rank: int) -> EngineConnection:
        deadline = trio.current_time() + REBIND_TIMEOUT
        while True:
            try:
                return self._open_life(rank, self._addresses[rank])
            except OSError as error:
                if error.errno != errno.EADDRINUSE or trio.current_time() > deadline:
                    raise
            await trio.sleep(0.02)
