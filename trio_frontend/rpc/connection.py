"""One connection: the thin driver between a transport, the HTTP/2 state machine and the calls.

Rules that hold here:

* One nursery holds the calls' tasks and the writer; the task that runs :meth:`Connection.run` reads, and does what time demands.
* What ends the connection ends its calls: bytes that stop (EOF is a client that has gone, RFC 9113 has no half-closed connection), a
  transport that breaks, a protocol error, a GOAWAY that names an error. A GOAWAY without one lets calls finish and then closes.
  END_STREAM ends a request, not its call; RST_STREAM ends exactly its call.
* Reading stops while more than ``http2.max_unsent`` bytes wait to be written: whoever does not read is not listened to.
* The end is bounded by ``close_timeout``: half of it for cancelled handlers to unwind, half for the last bytes and the client's own
  close. Then the transport is closed, whatever a handler behind a shield still does.
* Nothing that a client sends raises out of here; a fault of our own is logged by the server and costs this connection only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from trio_frontend.rpc import http2
from trio_frontend.rpc.call import CANCELLED, SHUTTING_DOWN, Call
from trio_frontend.rpc.dispatch import Refusal, Request, check_request
from trio_frontend.rpc.flush import Outbox
from trio_frontend.rpc.http2 import ErrorCode
from trio_frontend.rpc.status import Status, StatusCode
from trio_frontend.rpc.timers import Due, Timers
from trio_frontend.rpc.waiting import Waiter

if TYPE_CHECKING:
    from trio_frontend.rpc.interceptors import Interceptor
    from trio_frontend.rpc.server import Server
    from trio_frontend.rpc.transports import Transport

__all__ = ["Connection"]

logger = logging.getLogger(__name__)

_ALL_STREAMS: Final = 2**31 - 1
_KEEPALIVE: Final = b"alive?  "
_DRAIN: Final = b"draining"
_LOST: Final = Status(StatusCode.CANCELLED, "connection lost")
_TOO_OLD: Final = Status(StatusCode.UNAVAILABLE, "connection is too old")


class Connection:
    """A server's connection with one client. ``run`` is its life; everything else is called while it runs."""

    def __init__(self, server: Server, transport: Transport) -> None:
        now = trio.current_time()
        self.limits = server.limits
        self.interceptors: Sequence[Interceptor] = server.interceptors
        self.packing_threads = server.packing_threads
        self.transport = transport
        self.core = http2.Connection(server.limits.http2)
        self.outbox = Outbox(self.core, transport, server.flusher, server.limits, self._start_writer, self._lost)
        self.calls: dict[int, Call] = {}
        """Calls whose task has not ended, by stream id; it may outlive its stream."""
        self.open = True
        """Whether the transport is open."""
        self._server = server
        self._nursery: trio.Nursery | None = None
        self._timers = Timers(server.limits, now)
        self._timer_scope = trio.CancelScope()
        self._blocked: dict[int, Waiter] = {}
        self._calls_done = Waiter()
        self._established = False  # the handshake is over
        self._finished = False  # nothing more is to be read
        self._broken = False  # nothing can be written
        self._draining = False
        self._said_last_goaway = False
        self._cut_off_status = SHUTTING_DOWN
        self._last_headers: http2.Headers | None = None
        self._last_request: Request | None = None

    # --- its life ---

    async def run(self) -> None:
        """Serve the connection until it ends. The transport is closed on return, and before a handler's shield is waited for."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    self._server.connection_opened(self)
                    await self._establish()
                    while not self._finished:
                        with trio.CancelScope(deadline=self._timers.next()) as self._timer_scope:
                            await self._read()
                        self._look_at_the_time()
                    await self._close()
                finally:
                    await self._close_transport()
                nursery.cancel_scope.cancel()
        finally:
            self._server.connection_closed(self)

    async def _establish(self) -> None:
        with trio.CancelScope(deadline=self._timers.preface_by) as self._timer_scope:
            if self._finished:
                return
            try:
                await self.transport.handshake()
            except trio.BrokenResourceError as exc:
                logger.info("handshake of %s failed: %s", self.transport.peer, exc.__cause__ or exc)
                self._lost("handshake failed")
            self._established = True
            self.outbox.schedule()  # our SETTINGS
        if self._timer_scope.cancelled_caught:
            self._lost(Due.PREFACE.value)

    async def _read(self) -> None:
        """Read and act until there is nothing more to read."""
        max_unsent = self.limits.http2.max_unsent
        while not self._finished:
            if self.outbox.backlog > max_unsent:
                self._timers.frame_by = math.inf  # we are the ones who do not go on
                await self.outbox.wait_below(max_unsent)
            try:
                data = await self.transport.receive()
            except trio.BrokenResourceError as exc:
                self._lost(str(exc))
                return
            if data:
                self._received(data)
            else:
                self._lost("client closed the connection")

    async def _close(self) -> None:
        if self._draining and not self._said_last_goaway:
            self.core.go_away(ErrorCode.NO_ERROR)
            self.outbox.schedule()
        with trio.move_on_after(self.limits.close_timeout / 2):
            while self.calls:
                await self._calls_done.wait()
        for call in self.calls.values():
            logger.warning("handler of %s does not end though its call has; its connection is closed", call.path)
            call.end_now()
        if self._broken:
            return
        with trio.move_on_after(self.limits.close_timeout / 2):
            await self.outbox.wait_below(0)
            with suppress(trio.BrokenResourceError):
                await self.transport.send_eof()
                # Closing with unread bytes would reset the connection, and destroy what the client has not read yet.
                while await self.transport.receive():
                    pass

    async def _close_transport(self) -> None:
        self.open = False
        for call in self.calls.values():
            call.cut(_LOST)
        self.outbox.lost()
        await self.transport.aclose()

    # --- bytes in ---

    def _received(self, data: bytes) -> None:
        now = trio.current_time()
        core = self.core
        events = core.receive_data(data, now)
        timers = self._timers
        if events:
            self._act_on(events, now)
        timers.read(now, core.unfinished, core.progressed)
        if timers.frame_by < self._timer_scope.deadline:
            self._timer_scope.deadline = timers.frame_by
        if core.settings_received:
            timers.preface_by = math.inf
        if core.out:
            self.outbox.schedule()

    def _act_on(self, events: list[http2.Event], now: float) -> None:
        calls = self.calls
        new: list[Call] = []
        for event in events:
            if isinstance(event, http2.DataReceived):
                call = calls.get(event.stream_id)
                if call is not None:
                    call.data_received(event.data, event.flow_controlled_length, event.end_stream)
            elif isinstance(event, http2.RequestReceived):
                call = self._request_received(event, now)
                if call is not None:
                    new.append(call)
            elif isinstance(event, http2.WindowUpdated):
                self._window_updated(event.stream_id)
            elif isinstance(event, http2.StreamReset):
                self._stream_reset(event)
            elif isinstance(event, http2.TrailersReceived):
                call = calls.get(event.stream_id)
                if call is not None:
                    call.request_ended()
            elif isinstance(event, http2.PingAcked):
                if event.payload == _DRAIN:
                    self._say_last_goaway()
            elif isinstance(event, http2.GoAwayReceived):
                self._goaway_received(event)
            elif isinstance(event, http2.ConnectionFailed):
                logger.info("connection of %s failed: %s", self.transport.peer, event.error)
                self._cut(_LOST)
            if self._finished:
                break
        for call in new:
            self._start(call)

    def _request_received(self, event: http2.RequestReceived, now: float) -> Call | None:
        if len(self.calls) >= self.limits.http2.max_concurrent_streams:
            # Streams are closed faster than their handlers unwind.
            self.core.reset_stream(event.stream_id, ErrorCode.REFUSED_STREAM)
            return None
        headers = event.headers
        if headers is self._last_headers and self._last_request is not None:
            request = self._last_request
        else:
            checked = check_request(headers, self._server.methods, self._server.service_names)
            if isinstance(checked, Refusal):
                logger.debug("request of %s refused: %s", self.transport.peer, checked.message)
                with suppress(http2.StreamClosed):  # by what came later in the same read
                    self.core.send_headers(event.stream_id, checked.block, True)
                return None
            request = checked
            self._last_headers, self._last_request = headers, request
        call = Call(self, event.stream_id, request, now)
        if event.end_stream:
            call.request_ended()
        self.calls[event.stream_id] = call
        self._timers.busy()
        return call

    def _start(self, call: Call) -> None:
        """Start a call's task, unless the call has ended in the same read as it began."""
        if call.ended:
            call.status = CANCELLED
            self.call_ended(call)
        else:
            assert self._nursery is not None
            self._nursery.start_soon(call.run, name=call.path)

    def _window_updated(self, stream_id: int) -> None:
        if stream_id:
            waiter = self._blocked.get(stream_id)
            if waiter is not None:
                waiter.wake()
        else:
            for waiter in self._blocked.values():
                waiter.wake()

    def _stream_reset(self, event: http2.StreamReset) -> None:
        call = self.calls.get(event.stream_id)
        if call is not None:
            call.cut(CANCELLED if event.by_peer else Status(StatusCode.INTERNAL, "client broke the HTTP/2 protocol"))

    def _goaway_received(self, event: http2.GoAwayReceived) -> None:
        if event.error_code != ErrorCode.NO_ERROR:
            # RFC 9113 section 5.4.1: whoever names an error closes the connection.
            logger.info("client %s left with HTTP/2 error %d: %r", self.transport.peer, event.error_code, event.debug[:100])
            self._cut(_LOST)
            return
        self._draining = self._said_last_goaway = True
        self._finish_if_drained()

    # --- what calls ask ---

    def acknowledge(self, stream_id: int, n: int) -> None:
        """``n`` bytes of a request were taken: give them back to the client's window."""
        self.core.acknowledge(stream_id, n)
        if self.core.out:
            self.outbox.schedule()

    async def wait_for_window(self, stream_id: int, waiter: Waiter) -> None:
        """Wait until the stream's window may have opened, or the waiter is woken for another reason."""
        self._blocked[stream_id] = waiter
        try:
            await waiter.wait()
        finally:
            del self._blocked[stream_id]

    def call_ended(self, call: Call) -> None:
        del self.calls[call.stream_id]
        if self._draining:
            self._server.call_ended()
        if not self.calls:
            self._timers.idle(trio.current_time())
            self._calls_done.wake()
            if self._draining:
                self._finish_if_drained()
            elif self._timers.idle_at < self._timer_scope.deadline:
                self._timer_scope.deadline = self._timers.idle_at

    # --- how it ends ---

    def drain(self, cut_off_at: float, status: Status = SHUTTING_DOWN) -> None:
        """Let the calls in flight finish, take no new ones, and close. At ``cut_off_at`` (Trio's clock) the rest end with ``status``.

        Called again, an earlier time counts.
        """
        if not self._established:
            self._lost("shut down before it began")
        if self._finished:
            return
        self._cut_off_status = status
        self._timers.cut_off_at = min(self._timers.cut_off_at, cut_off_at)
        if not self._draining:
            self._draining = True
            # The first GOAWAY refuses nothing: what the client sends until the PING has come back was sent in good faith.
            self.core.go_away(ErrorCode.NO_ERROR, _ALL_STREAMS)
            self.core.ping(_DRAIN)
            self._timers.last_goaway_at = trio.current_time() + self.limits.drain_ping_timeout
            self.outbox.schedule()
        self._timer_scope.deadline = min(self._timer_scope.deadline, self._timers.next())

    def _say_last_goaway(self) -> None:
        if self._draining and not self._said_last_goaway:
            self._said_last_goaway = True
            self._timers.last_goaway_at = math.inf
            self.core.go_away(ErrorCode.NO_ERROR)
            self.outbox.schedule()
            self._finish_if_drained()

    def _finish_if_drained(self) -> None:
        if self._said_last_goaway and not self.calls and not self._finished:
            self._finished = True
            self._timer_scope.cancel()

    def _look_at_the_time(self) -> None:
        now = trio.current_time()
        while not self._finished:
            due = self._timers.due(now)
            if due is None:
                return
            if due is Due.PING:
                self.core.ping(_KEEPALIVE)
                self.outbox.schedule()
            elif due is Due.AGE:
                self.drain(now + self.limits.max_connection_age_grace, _TOO_OLD)
            elif due is Due.IDLE:
                self.drain(math.inf)
            elif due is Due.LAST_GOAWAY:
                self._say_last_goaway()
            elif due is Due.CUT_OFF:
                self._finish(self._cut_off_status)
            elif due is Due.SILENCE:
                self._lost(due.value)
            else:
                logger.info("connection of %s closed: %s", self.transport.peer, due.value)
                self.core.go_away(ErrorCode.ENHANCE_YOUR_CALM, debug=due.value.encode())
                self.outbox.schedule()
                self._cut(_LOST)

    def _finish(self, status: Status) -> None:
        """Read no more, end all calls with ``status``, write what is left, close."""
        self._finished = True
        for call in self.calls.values():
            call.end(status)
        self._timer_scope.cancel()

    def _cut(self, status: Status) -> None:
        """Like :meth:`_finish`, but the calls' streams are gone."""
        for call in self.calls.values():
            call.cut(status)
        self._finish(status)

    def _lost(self, reason: str) -> None:
        """The client has gone, or cannot be reached: nothing can be written."""
        if not self._broken:
            logger.debug("connection of %s lost: %s", self.transport.peer, reason)
            self._broken = True
            self._cut(_LOST)
            self.outbox.lost()

    def _start_writer(self, writer: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(writer, name=f"writer of {self.transport.peer}")
