"""ZeroMQ sockets on Trio: one task waits on a socket's FD, nothing polls, no thread belongs to a socket.

Rules that hold here:

* The FD of a ZeroMQ socket is edge-triggered and says only "look at me": whoever waits on it first looks at ``ZMQ_EVENTS``, or
  tries and gets EAGAIN, which is the same look, and waits only when there is nothing (``zmq_getsockopt(3)``, ZMQ_FD).
* Every call on a socket may swallow the edge that another task waits for. So a socket has one task that waits, and any other
  task that sends on it does so only while nobody waits on it.
* Events of a socket (connected, gone) come from libzmq's own monitor, over an inproc PAIR socket that is waited for likewise.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
import zmq

__all__ = [
    "Frames",
    "Monitor",
    "MonitorEvent",
    "Socket",
    "open_context",
    "source_address",
    "source_fd",
    "speaks_current_protocol",
]

Frames = Sequence[bytes | memoryview]

TERM_TIMEOUT: Final = 2.0
"""Seconds that closing a context may take: longer than any socket's linger."""

# As plain ints: pyzmq's are enums, whose arithmetic costs more than the calls they go to.
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_SNDMORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

MONITORED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@asynccontextmanager
async def open_context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZeroMQ context with one I/O thread. All its sockets must be closed when the block ends.

    ``zmq_ctx_term`` waits until lingering messages are sent, so it runs in a worker thread, shielded and bounded.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    # The default of 1023 would end at 170 engines.
    context.set(zmq.MAX_SOCKETS, 8192)
    try:
        yield context
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + TERM_TIMEOUT):
            await trio.to_thread.run_sync(context.term, abandon_on_cancel=True)


class Socket:
    """A ZeroMQ socket. One task at a time may wait in it.

    ``hwm``: messages that may queue in each direction and peer; 0 is no bound. OSError if the process has no descriptor left.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, *, hwm: int = 1000) -> None:
        try:
            self.zmq: zmq.Socket[bytes] = context.socket(kind)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot make a ZeroMQ socket: {error.strerror}") from None
        self.zmq.set_hwm(hwm)
        self.zmq.setsockopt(zmq.LINGER, 0)
        self.fd = self._number(zmq.FD)

    def _number(self, option: int) -> int:
        value: int = self.zmq.getsockopt(option)  # type: ignore[assignment]
        return value

    @property
    def closed(self) -> bool:
        return bool(self.zmq.closed)

    def set_heartbeats(self, interval: float, timeout: float) -> None:
        """Ping every peer each ``interval`` seconds, and disconnect one that says nothing for ``timeout`` after a ping."""
        self.zmq.setsockopt(zmq.HEARTBEAT_IVL, math.ceil(interval * 1000))
        self.zmq.setsockopt(zmq.HEARTBEAT_TIMEOUT, math.ceil(timeout * 1000))

    def bind(self, address: str) -> str:
        """Bind to ``address`` (``tcp://HOST:*`` lets the system choose the port) and return what it became.

        OSError naming the address if it cannot be bound.
        """
        if _is_ipv6(address):
            self.zmq.setsockopt(zmq.IPV6, 1)
        try:
            self.zmq.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind {address}: {error.strerror}") from None
        return self.zmq.getsockopt_string(zmq.LAST_ENDPOINT)

    def readable(self) -> bool:
        """A message waits. To ask costs two system calls."""
        return bool(self._number(EVENTS) & POLLIN)

    def take(self) -> list[zmq.Frame] | None:
        """The frames of one message, None if none waits: which is told by an exception in pyzmq, and costs more than to ask first."""
        try:
            frame = self.zmq.recv(NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [frame]
        while frame.more:
            frame = self.zmq.recv(NOBLOCK, copy=False)
            frames.append(frame)
        return frames

    async def receive(self) -> list[zmq.Frame]:
        """The frames of the next message."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while (frames := self.take()) is None:
            await self.wait()
        return frames

    async def wait(self) -> None:
        """Until the socket's state may have changed. Try first (see the module's rules), and again afterwards."""
        await trio.lowlevel.wait_readable(self.fd)

    def send_nowait(self, frames: Frames) -> None:
        """Queue one message; ZeroMQ takes or refuses it as a whole.

        trio.WouldBlock if the peer's queue is full, OSError (EHOSTUNREACH) if a ROUTER has no such peer.
        """
        *more, last = frames
        send = self.zmq.send
        try:
            for frame in more:
                send(frame, NOBLOCK_SNDMORE)
            send(last, NOBLOCK)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot send: {error.strerror}") from None

    def close(self, linger: float = 0.0) -> None:
        """Close at once. What is queued for a peer is still sent for ``linger`` seconds, by ZeroMQ's own thread."""
        if not self.zmq.closed:
            trio.lowlevel.notify_closing(self.fd)
            self.zmq.close(linger=math.ceil(linger * 1000))


@dataclass(slots=True, frozen=True)
class MonitorEvent:
    """``kind`` is one of zmq.EVENT_*; ``fd`` is the connection's file descriptor where the event has one, -1 otherwise."""

    kind: int
    fd: int


class Monitor(trio.abc.ReceiveChannel[MonitorEvent]):
    """A socket's connection events as a channel. Close it before the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: Socket) -> None:
        self._watched = socket
        self._pair = Socket(context, zmq.PAIR)
        address = f"inproc://monitor-{id(socket):x}-{socket.fd}"
        socket.zmq.monitor(address, MONITORED)
        self._pair.zmq.connect(address)

    async def receive(self) -> MonitorEvent:
        return self._parse(await self._pair.receive())

    @staticmethod
    def _parse(frames: list[zmq.Frame]) -> MonitorEvent:
        # zmq_socket_monitor(3): uint16 event, int32 value, in the machine's order. (zmq.utils.monitor would import asyncio.)
        kind, value = struct.unpack("=Hi", frames[0].buffer)
        return MonitorEvent(kind, -1 if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED else value)

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.zmq.disable_monitor()
        self._pair.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


def source_fd(frame: zmq.Frame) -> int | None:
    """The file descriptor of the connection that a message came by, as its monitor events name it; None if ZeroMQ does not say."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def speaks_current_protocol(frame: zmq.Frame) -> bool:
    """Whether ``frame`` came from a peer that speaks ZMTP 3, which names its socket's type."""
    try:
        return bool(frame.get("Socket-Type"))
    except zmq.ZMQError:
        return False


def source_address(frame: zmq.Frame) -> str | None:
    """The IP address that a message came from; None if it did not come over TCP."""
    try:
        return str(frame.get("Peer-Address")) or None
    except zmq.ZMQError:
        return None


def _is_ipv6(address: str) -> bool:
    return address.startswith("tcp://") and address.count(":") > 2
