"""The way out: from a connection's output buffer to its client, one write per connection and loop turn.

Rules that hold here:

* Whoever has put bytes into a connection's ``out`` calls :meth:`Outbox.schedule`; that never waits. The write itself is the
  :class:`Flusher`'s, one task per server: it runs in the next turn of the loop and writes each connection's bytes of that turn at once,
  without waking a task of the connection.
* What the kernel does not take at once (its buffer is full, or there is TLS in between) goes to the connection's own writer task,
  and nobody else writes until that is done. It is started when it is first needed.
* Senders that wait do so for room below ``send_buffer`` bytes, in the order they came, each for one frame's worth at a time; so one
  large message does not keep the others waiting. Memory: ``send_buffer`` and one frame, twice while a write is under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from trio_frontend.rpc import http2
from trio_frontend.rpc.limits import ServerLimits
from trio_frontend.rpc.transports import Transport
from trio_frontend.rpc.waiting import Waiter

__all__ = ["CHUNK", "Flusher", "Outbox"]

CHUNK: Final = 16_384
"""Bytes that one sender puts into the buffer before the next has its turn."""


class Flusher:
    """Writes what the connections of one server have to send, once a loop turn."""

    __slots__ = ("_scheduled", "_waiter")

    def __init__(self) -> None:
        self._scheduled: list[Outbox] = []
        self._waiter = Waiter()

    def add(self, outbox: Outbox) -> None:
        self._scheduled.append(outbox)
        self._waiter.wake()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            while not self._scheduled:
                await self._waiter.wait()
            batch, self._scheduled = self._scheduled, []
            for outbox in batch:
                outbox.write_now()


class Outbox:
    """One connection's output: when it is written, and who may add to it.

    ``start_soon`` starts the writer in the connection's nursery; ``on_lost`` is called once if the transport breaks.
    """

    __slots__ = (
        "_core",
        "_drain_waiter",
        "_flusher",
        "_in_flight",
        "_limit",
        "_lost",
        "_on_lost",
        "_queue",
        "_reserved",
        "_scheduled",
        "_start_soon",
        "_transport",
        "_write_timeout",
        "_writer",
        "_writer_started",
        "_writing",
        "out",
    )

    def __init__(
        self,
        core: http2.Connection,
        transport: Transport,
        flusher: Flusher,
        limits: ServerLimits,
        start_soon: Callable[[Callable[[], Awaitable[None]]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.out = core.out
        self._core = core
        self._transport = transport
        self._flusher = flusher
        self._limit = limits.send_buffer
        self._write_timeout = limits.write_timeout
        self._start_soon = start_soon
        self._on_lost = on_lost
        self._scheduled = False
        self._lost = False
        self._in_flight = 0
        self._reserved = 0
        self._queue: dict[Waiter, int] = {}
        self._drain_waiter = Waiter()
        self._writer = Waiter()
        self._writer_started = False
        self._writing = False

    @property
    def backlog(self) -> int:
        """Bytes that the transport has not taken yet."""
        return len(self.out) + self._in_flight

    @property
    def has_room(self) -> bool:
        return len(self.out) + self._in_flight < self._limit

    def schedule(self) -> None:
        """There is something to write: do so in the next loop turn."""
        if not self._scheduled and not self._writing:
            self._scheduled = True
            if self._transport.sends_at_once:
                self._flusher.add(self)
            else:
                self._wake_writer()

    def write_now(self) -> None:
        """Write what the kernel takes without waiting."""
        if self._lost:
            return
        self._scheduled = False
        out = self.out
        if self._writing or not out:
            return
        try:
            sent = self._transport.send_now(out)
        except trio.BrokenResourceError as exc:
            self._fail(str(exc))
            return
        if sent == len(out):
            out.clear()
        else:
            del out[:sent]
            self._wake_writer()
        self._written()

    def lost(self) -> None:
        """The transport is gone: whoever waits here goes on, and finds out."""
        self._lost = True
        self._scheduled = True  # for good: nothing is written any more
        self.out.clear()
        for waiter in list(self._queue):
            waiter.wake()
        self._drain_waiter.wake()

    async def wait_below(self, level: int) -> None:
        """Wait until at most ``level`` bytes are unwritten, or the transport is gone. One task at a time."""
        while self.backlog > level and not self._lost:
            await self._drain_waiter.wait()

    async def wait_for_room(self, waiter: Waiter, wanted: int) -> bool:
        """Wait in line for room for ``wanted`` bytes (at most CHUNK). True: it is there, and the caller sends, if it still may, and
        calls :meth:`admit`, whether it sent or not. False: woken for another reason."""
        self._queue[waiter] = wanted
        try:
            await waiter.wait()
        finally:
            admitted = self._queue.pop(waiter, None) is None
            if admitted:
                self._reserved -= wanted
        return admitted

    def admit(self) -> None:
        """Wake as many of those who wait in line as there is room for."""
        queue = self._queue
        while queue and len(self.out) + self._in_flight + self._reserved < self._limit:
            waiter = next(iter(queue))
            self._reserved += queue.pop(waiter)
            waiter.wake()

    @property
    def crowded(self) -> bool:
        """Whether others wait in line."""
        return bool(self._queue)

    def _written(self) -> None:
        if self._queue:
            self.admit()
        self._drain_waiter.wake()

    def _fail(self, reason: str) -> None:
        if not self._lost:
            self.lost()
            self._on_lost(reason)

    def _wake_writer(self) -> None:
        self._writing = True
        if self._writer_started:
            self._writer.wake()
        else:
            self._writer_started = True
            self._start_soon(self._write)

    async def _write(self) -> None:
        """The connection's writer: writes what is there, and waits until there is more. Runs until cancelled."""
        while not self._lost:
            self._scheduled = False
            while self.out and not self._lost:
                data = self._core.take_output()
                self._in_flight = len(data)
                try:
                    with trio.move_on_after(self._write_timeout) as scope:
                        await self._transport.send_all(data)
                except trio.BrokenResourceError as exc:
                    self._fail(str(exc))
                    return
                finally:
                    self._in_flight = 0
                if scope.cancelled_caught:
                    self._fail(f"client took none or too little of its data in {self._write_timeout:g} s")
                    return
                self._written()
            self._writing = False
            await self._writer.wait()
