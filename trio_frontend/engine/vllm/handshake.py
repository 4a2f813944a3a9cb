"""The handshake: HELLO from an engine, the answer with its addresses, READY. Also how an engine that comes back is taken in.

It is what ``vllm.v1.engine.utils.wait_for_engine_startup`` does for vLLM's frontend, with these differences: a message that
makes no sense is logged and changes nothing, so that a stray process cannot take a server down; and it never ends, so that an
engine may come back. Rules that hold here:

* A HELLO begins a new life of its rank. If the rank's present life still starts, the newer HELLO wins: the engine was restarted.
* If the present life serves, the HELLO waits: it is answered when that life has failed. A rank is never taken from a healthy
  engine by a second one that was configured with the same rank.
* Anyone can connect here. Whatever comes, and however fast, other tasks run between a turn's worth of messages, and the log grows by
  a few lines a second at most.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import trio
import zmq

from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.connection import EngineConnection, Step
from trio_frontend.engine.vllm.sockets import Heartbeats
from trio_frontend.engine.vllm.transport import Monitor, Socket, source_address, source_fd

__all__ = ["Handshake"]

logger = logging.getLogger(__name__)

TURN: Final = 16
"""Messages handled before other tasks run."""

LOGGED_AT_ONCE: Final = 10
LOGGED_WITHIN: Final = 10.0
"""So many messages that were ignored are logged in so many seconds; the rest are counted."""

MAX_MESSAGE_SIZE: Final = 2**20
"""Bytes. What an engine says here has some hundred; ZeroMQ drops a connection that announces more, before it takes it in."""


class Handshake:
    """The handshake socket and what was heard there. ``run`` is its task.

    ``connect(rank, peer)`` begins a new life and returns it with the encoded answer to HELLO; ``peer`` is the engine's IP
    address, None where there is none. ``reconnect`` False: each rank has one life only.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        ranks: range,
        connect: Callable[[int, str | None], tuple[EngineConnection, bytes]],
        *,
        heartbeats: Heartbeats | None,
        reconnect: bool,
    ) -> None:
        self._ranks = ranks
        self._connect = connect
        self._reconnect = reconnect
        self._lives: dict[int, EngineConnection] = {}
        self._waiting: dict[int, str | None] = {}
        self._fds: dict[int, int | None] = {}
        self.strangers: list[str] = []
        self._logged: deque[float] = deque(maxlen=LOGGED_AT_ONCE)
        self._unlogged = 0
        self._socket = Socket(context, zmq.ROUTER)
        # A restarted engine takes over the identity of the one that its predecessor's connection may still hold.
        self._socket.zmq.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.zmq.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_SIZE)
        if heartbeats is not None:
            self._socket.set_heartbeats(heartbeats.interval, heartbeats.timeout)
        self._monitor = Monitor(context, self._socket)
        try:
            self.address = self._socket.bind(address)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()

    async def run(self) -> None:
        """Take engines in, for ever. The socket is closed when this is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                while True:
                    await self._handle_waiting()
                    await self._socket.wait()
        finally:
            self.close()

    async def _handle_waiting(self) -> None:
        handled = 0
        while (frames := self._socket.take()) is not None:
            self._handle(frames)
            handled += 1
            if not handled % TURN:
                await trio.lowlevel.checkpoint()

    def life_ended(self, rank: int) -> None:
        """The present life of ``rank`` has failed: an engine that waits in its place is answered now."""
        if rank in self._waiting:
            self._begin(rank, self._waiting.pop(rank))

    def _handle(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        rank = int.from_bytes(identity, "little")
        if len(identity) != 2:
            self._stranger(f"a peer with the identity {identity.hex()}, which is no engine's (2 bytes)")
        elif rank not in self._ranks:
            self._stranger(
                f"rank {rank}, and ranks {self._ranks.start} to {self._ranks.stop - 1} are expected (data_parallel_size)"
            )
        elif len(frames) != 2:
            self._stranger(f"rank {rank} with a message of {len(frames)} frames")
        else:
            try:
                message = wire.decode_handshake(frames[1])
            except wire.WireError as error:
                self._stranger(f"rank {rank}: {error}")
                return
            if message.status == "HELLO":
                self._fds[rank] = source_fd(frames[1])
                self._hello(rank, source_address(frames[1]))
            elif message.status == "READY":
                self._ready(rank)
            else:
                self._stranger(f"rank {rank} with the status {message.status[:40]!r}")

    def _stranger(self, what: str) -> None:
        """Logged, and kept for the error that a start without its engines ends with. The newest few are enough."""
        now = trio.current_time()
        if len(self._logged) < LOGGED_AT_ONCE or now - self._logged[0] > LOGGED_WITHIN:
            logger.warning(
                "handshake: ignored %s%s", what, f" (and {self._unlogged} messages before it)" if self._unlogged else ""
            )
            self._logged.append(now)
            self._unlogged = 0
        else:
            self._unlogged += 1
        self.strangers = [*self.strangers[-3:], what]

    def _hello(self, rank: int, peer: str | None) -> None:
        life = self._lives.get(rank)
        joined = life is not None and not life.missing  # it serves, or has served
        if joined and not self._reconnect:
            self._stranger(f"rank {rank}, which comes back, and engines are not taken in again (engine_reconnect)")
        elif life is not None and life.serving:
            if rank not in self._waiting:
                logger.warning(
                    "rank %d says HELLO while an engine of that rank serves: it waits until that one is gone", rank
                )
            self._waiting[rank] = peer
        else:
            self._begin(rank, peer)

    def _begin(self, rank: int, peer: str | None) -> None:
        before = self._lives.get(rank)
        if before is not None:
            before.end()
        try:
            life, answer = self._connect(rank, peer)
        except OSError as error:
            logger.error("rank %d said HELLO and cannot be taken in: %s", rank, error)
            return
        self._lives[rank] = life
        try:
            self._socket.send_nowait((life.identity, answer))
        except (OSError, trio.WouldBlock):
            logger.warning("rank %d said HELLO and is gone", rank)
            life.end()
            return
        life.done(Step.HELLO)
        logger.info("rank %d said HELLO%s, it loads its model now", rank, f" from {peer}" if peer else "")

    def _ready(self, rank: int) -> None:
        life = self._lives.get(rank)
        if life is None or not life.starting:
            self._stranger(f"rank {rank} with READY and no HELLO before it")
        else:
            life.done(Step.READY)

    async def _watch(self) -> None:
        """An engine keeps its handshake connection until it has said READY: one that goes before that has died loading."""
        async for event in self._monitor:
            if event.kind != zmq.EVENT_DISCONNECTED:
                continue
            await self._handle_waiting()  # its READY may have come just before
            for rank, fd in list(self._fds.items()):
                if fd == event.fd:
                    del self._fds[rank]
                    life = self._lives.get(rank)
                    if life is not None and Step.READY in life.missing and life.starting:
                        logger.warning("rank %d closed its handshake connection before it was ready", rank)
