"""What goes to one engine core: requests and aborts that gather and leave together, and whatever must go at once.

Rules that hold here:

* Requests and aborts gather, and leave when the loop comes round to the sender: requests one after another, without a wake of
  ZeroMQ's thread for each, then the aborts in one message. Whatever else is sent goes after what has gathered.
* Nothing waits but the sender's own task. A queue that the engine does not read refuses what is new; what has gathered stays, in order.
* Bounds: ``GATHERED`` requests and, in the socket, its send high-water mark. Aborts are at most as many as requests were added.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import trio

from trio_frontend.engine.base import EngineUnavailableError
from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.transport import Socket

__all__ = ["Outgoing"]

logger = logging.getLogger(__name__)

GATHERED: Final = 64
"""Requests that wait for the sender's turn at most: all that one read from a connection brings, as a rule."""

Message = tuple[bytes, bytes, bytes]
"""To the engine: its identity, the type of the request, its body."""


class Outgoing:
    """The sending half of an engine connection. ``run`` is its task; everything else is called from the same Trio run."""

    def __init__(self, rank: int, identity: bytes, socket: Socket) -> None:
        self._rank = rank
        self._identity = identity
        self._socket = socket
        self._gathered: list[Message] = []
        self._aborts: list[str] = []
        self._wanted = trio.Event()
        self._blocked = False

    def add(self, body: bytes) -> None:
        """Send an ADD, soon. EngineUnavailableError if the engine does not read."""
        if self._blocked or (len(self._gathered) >= GATHERED and not self.flush()):
            raise self._unread()
        self._gathered.append((self._identity, wire.ADD, body))
        self._wanted.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Send an ABORT, soon."""
        self._aborts.extend(request_ids)
        self._wanted.set()

    def utility(self, body: bytes) -> None:
        """Send a UTILITY call at once. EngineUnavailableError if the engine does not read or is not connected."""
        # While the sender waits in the socket it must be left alone.
        if self._blocked or not self.flush():
            raise self._unread()
        try:
            self._socket.send_nowait((self._identity, wire.UTILITY, body))
        except trio.WouldBlock:
            raise self._unread() from None
        except OSError:
            raise EngineUnavailableError(f"the engine of rank {self._rank} is not connected") from None

    async def run(self) -> None:
        """Send what gathers, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while not self.flush():
                self._blocked = True
                await self._socket.wait()
            self._blocked = False

    def flush(self) -> bool:
        """Send what has gathered. False if the engine's queue is full: what is left stays, in order."""
        gathered, send = self._gathered, self._socket.send_nowait
        sent = 0
        try:
            for frames in gathered:
                send(frames)
                sent += 1
            if self._aborts:
                send((self._identity, wire.ABORT, wire.encode(self._aborts)))
        except trio.WouldBlock:
            del gathered[:sent]
            return False
        except OSError:
            # Its monitor tells of that as well, and the requests end then.
            logger.debug("rank %d is not connected, %d messages are dropped", self._rank, len(gathered) - sent)
        gathered.clear()
        self._aborts = []
        return True

    def _unread(self) -> EngineUnavailableError:
        return EngineUnavailableError(f"the engine of rank {self._rank} does not read its requests")
