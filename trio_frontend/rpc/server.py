"""The server: listeners in, connections served, and the order in which it all ends. Read this page first.

Rules that hold here:

* ``serve`` is one nursery: a task for each listener, one for each connection, and the flusher that writes for all of them. When it
  returns, nothing is left.
* An error in a call ends that call, an error in a connection that connection. Neither ends the server.
* ``shutdown(grace)``: listeners close; every connection says GOAWAY; calls in flight finish; after ``grace`` seconds the rest end with
  UNAVAILABLE; connections close; ``serve`` returns. Cancelling the nursery around ``serve`` does the same with a grace of 0, and takes
  no longer than ``close_timeout`` and a second.
* A handler behind a shield outlives its connection, and ``serve`` waits for it: Trio abandons no task.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import ssl
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import trio

from trio_frontend.rpc.call import SHUTTING_DOWN
from trio_frontend.rpc.connection import Connection
from trio_frontend.rpc.flush import Flusher
from trio_frontend.rpc.limits import ServerLimits
from trio_frontend.rpc.listeners import Listener, listen_tcp
from trio_frontend.rpc.methods import methods_of
from trio_frontend.rpc.orderly import run_orderly
from trio_frontend.rpc.transports import SocketTransport, StreamTransport, Transport, describe_address

if TYPE_CHECKING:
    from purerpc.server import Service, Servicer

    from trio_frontend.rpc.call import Call
    from trio_frontend.rpc.interceptors import Interceptor

__all__ = ["Address", "Server", "serve"]

logger = logging.getLogger(__name__)

Address = tuple[str, int] | str
"""``(host, port)``, or the path of a Unix socket."""

_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CLIENT_GONE: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPERM,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
    }
)
"""What accept says of a connection that failed before it was accepted (accept(2), "Error handling")."""

_PAUSE: Final = 0.1
"""Seconds to wait for file descriptors to become free."""

_ACCEPTED_AT_ONCE: Final = 64
"""Connections accepted from one listener before others have their turn."""

_PACKING_THREADS: Final = 2
"""Threads that pack and unpack large gzip messages: such messages wait for each other, not for the machine's other work."""

_MARGIN: Final = 1.0
"""Seconds after ``close_timeout`` at which a cancelled ``serve`` is cancelled the hard way."""


class Server:
    """A gRPC server for purerpc ``services`` (or servicers).

    ``interceptors`` run around every call, the first outermost. A Server serves once.
    """

    def __init__(
        self,
        services: Iterable[Service | Servicer],
        *,
        limits: ServerLimits | None = None,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self.methods, self.service_names = methods_of(services)
        self.limits = limits if limits is not None else ServerLimits()
        self.interceptors = tuple(interceptors)
        self.flusher = Flusher()
        self.packing_threads = trio.CapacityLimiter(_PACKING_THREADS)
        self._connections: set[Connection] = set()
        self._accepted = 0  # sockets of listeners that are not closed
        self._full = False
        self._serving = False
        self._shutdown_begun = trio.Event()
        self._cut_off_at = math.inf
        self._changed = trio.lowlevel.ParkingLot()

    # --- what is there now ---

    @property
    def live_connections(self) -> int:
        """Connections whose transport is open, those in a TLS handshake included."""
        return sum(connection.open for connection in self._connections)

    @property
    def live_calls(self) -> int:
        """Calls that have not ended: their client waits for a status."""
        return sum(not call.ended for connection in self._connections for call in connection.calls.values())

    @property
    def running_handlers(self) -> int:
        """Calls whose task has not ended, with those whose client has gone while their handler unwinds."""
        return sum(len(connection.calls) for connection in self._connections)

    # --- serving ---

    async def serve(
        self,
        listeners: Iterable[Listener],
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve ``listeners`` until :meth:`shutdown`, and close them. Ready when started, with the listeners' addresses.

        Raises RuntimeError if this server has served before, and Cancelled, after the orderly end, if it is cancelled.
        """
        if self._serving or self._shutdown_begun.is_set():
            raise RuntimeError("a Server serves once")
        self._serving = True
        listeners = list(listeners)
        try:
            task_status.started([listener.address for listener in listeners])
            await run_orderly(lambda: self._run(listeners), self._stop, self.limits.close_timeout + _MARGIN)
        finally:
            for listener in listeners:
                listener.close()
            self._serving = False
            self._changed.unpark_all()

    async def serve_stream(self, stream: trio.abc.Stream, *, peer: str = "stream") -> None:
        """Serve one connection over any Trio stream (in memory, through a proxy, over TLS) until it ends, and close it.

        Works beside :meth:`serve` and without it; :meth:`shutdown` drains it too.
        """
        connection = Connection(self, StreamTransport(stream, peer))

        def stop() -> None:
            connection.drain(trio.current_time())

        await run_orderly(lambda: self._serve_connection(connection), stop, self.limits.close_timeout + _MARGIN)

    async def shutdown(self, grace: float = 5.0) -> None:
        """Drain: take no new connections, let calls finish for ``grace`` seconds, end the rest with UNAVAILABLE, close. Returns when
        nothing is left.

        Called again, also while another waits, the earlier end counts. Cancelling the wait does not stop the drain.
        """
        self.begin_shutdown(grace)
        await trio.lowlevel.checkpoint()
        while self._serving or self._connections:
            await self._changed.park()

    def begin_shutdown(self, grace: float) -> None:
        """What :meth:`shutdown` does, without the wait for its end."""
        if not grace >= 0:
            raise ValueError(f"grace is {grace}; it must be at least 0 seconds")
        self._cut_off_at = min(self._cut_off_at, trio.current_time() + grace)
        self._shutdown_begun.set()
        for connection in self._connections:
            connection.drain(self._cut_off_at)

    async def wait_drained(self, but: Container[str] = ()) -> None:
        """Wait, in a shutdown, until no call is in flight, calls of the services named in ``but`` aside.

        Those are services whose calls last as long as their client likes (health watches): no drain should wait for one.
        """
        await trio.lowlevel.checkpoint()
        while any(True for _ in self._in_flight(but)):
            await self._changed.park()

    def cut_off(self, but: Container[str] = ()) -> int:
        """End the calls in flight with UNAVAILABLE, calls of the services named in ``but`` aside; returns how many there were."""
        calls = list(self._in_flight(but))
        for call in calls:
            call.end(SHUTTING_DOWN)
        return len(calls)

    def _in_flight(self, but: Container[str]) -> Iterator[Call]:
        for connection in self._connections:
            for call in connection.calls.values():
                if not call.ended and call.service_name not in but:
                    yield call

    def _stop(self) -> None:
        self.begin_shutdown(0)

    async def _run(self, listeners: Sequence[Listener]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.flusher.run)
            async with trio.open_nursery() as connections, trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, connections)
                await self._shutdown_begun.wait()
                accepting.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    # --- connections ---

    async def _accept(self, listener: Listener, connections: trio.Nursery) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(listener.socket)
                if not self._accept_some(listener, connections):
                    await trio.sleep(_PAUSE)
        finally:
            trio.lowlevel.notify_closing(listener.socket)
            listener.close()

    def _accept_some(self, listener: Listener, connections: trio.Nursery) -> bool:
        """Accept what waits. False: the process is out of something, try later."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = listener.socket.accept()
            except BlockingIOError:
                return True
            except OSError as exc:
                if exc.errno in _CLIENT_GONE:
                    continue
                if exc.errno not in _OUT_OF_FILES:
                    raise
                logger.error("cannot accept on %s: %s", listener.address, exc.strerror)
                return False
            if self._accepted >= self.limits.max_connections:
                if not self._full:
                    self._full = True
                    logger.warning("over %d connections: closing new ones", self.limits.max_connections)
                sock.close()
                continue
            self._accepted += 1
            connections.start_soon(self._serve_socket, sock, describe_address(sock, address), listener.tls)
        return True

    async def _serve_socket(self, sock: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            transport: Transport
            if tls is None:
                transport = SocketTransport(sock, peer)
            else:
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
                transport = StreamTransport(trio.SSLStream(stream, tls, server_side=True, https_compatible=True), peer)
            await self._serve_connection(Connection(self, transport))
        finally:
            self._accepted -= 1
            if self._accepted < self.limits.max_connections:
                self._full = False

    async def _serve_connection(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            logger.exception("connection of %s failed by a fault of the server", connection.transport.peer)

    def connection_opened(self, connection: Connection) -> None:
        """A connection begins."""
        self._connections.add(connection)
        if self._shutdown_begun.is_set():
            connection.drain(self._cut_off_at)

    def call_ended(self) -> None:
        """A call of a connection that drains has ended."""
        self._changed.unpark_all()

    def connection_closed(self, connection: Connection) -> None:
        """A connection has ended, with all its tasks."""
        self._connections.discard(connection)
        self._changed.unpark_all()


async def serve(
    services: Iterable[Service | Servicer],
    listeners: Iterable[Listener] | None = None,
    *,
    limits: ServerLimits | None = None,
    interceptors: Sequence[Interceptor] = (),
    task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The short way: serve ``services`` until cancelled, on 127.0.0.1 and a port of the system's choice unless ``listeners`` are given.

    ``addresses = await nursery.start(rpc.serve, services)``
    """
    server = Server(services, limits=limits, interceptors=interceptors)
    await server.serve(await listen_tcp() if listeners is None else listeners, task_status=task_status)
