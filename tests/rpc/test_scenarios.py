"""Protects every order of events: calls opened, fed, stalled, cancelled, timed out, cut off, in any order, against a model.

The model is exact: after each action every call must have ended as the model says, or not at all, with the same status for the
interceptor and for the client. At the end nothing may be left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rpc.harness import BIDI, Client, Serving, framed, service, value
from tests.rpc.http2 import wire
from trio_frontend import rpc

WINDOW = 3_000
BIG = b"b" * 4_000
OK, CANCELLED, DEADLINE_EXCEEDED, ABORTED, INTERNAL, UNAVAILABLE = 0, 1, 4, 10, 13, 14
SENT_TO_CLIENTS = {OK, DEADLINE_EXCEEDED, ABORTED, UNAVAILABLE}


async def obey(messages: rpc.Call, request: rpc.Call) -> None:
    """The handler: each message is a command."""
    async for message in messages:
        command = message.value
        if command == b"fail":
            raise rpc.StatusError(rpc.StatusCode.ABORTED)
        if command == b"return":
            return
        if command == b"hang":
            await trio.sleep_forever()
        if command == b"big":
            await request.send(value(BIG))
        else:
            await request.send(message)


@dataclass
class ModelCall:
    """What the rules say about one call: the commands it has not obeyed, the window it has, and how it ended."""

    client: Client
    stream_id: int
    deadline: float
    commands: deque[bytes] = field(default_factory=deque)
    window: int = WINDOW
    debt: int = 0
    sending: bytes = b""
    sent: list[bytes] = field(default_factory=list)
    hanging: bool = False
    half_closed: bool = False
    reset: bool = False
    status: int | None = None

    def run(self) -> None:
        """Obey what can be obeyed."""
        while self.status is None and not self.hanging:
            paid = min(self.debt, max(self.window, 0))
            self.window -= paid
            self.debt -= paid
            if self.debt:
                return
            if self.sending:
                self.sent.append(self.sending)
                self.sending = b""
            if not self.commands:
                if self.half_closed:
                    self.status = OK
                return
            command = self.commands.popleft()
            if command == b"fail":
                self.status = ABORTED
            elif command == b"return":
                self.status = OK
            elif command == b"hang":
                self.hanging = True
            else:
                self.sending = BIG if command == b"big" else command
                self.debt = len(framed(self.sending))

    def end(self, status: int) -> None:
        if self.status is None:
            self.status = status


class Scenario:
    """A server, its clients and the model of them."""

    def __init__(self, serve: Serving, statuses: dict[rpc.Call, int]) -> None:
        self.serve = serve
        self.statuses = statuses
        self.clients: list[Client] = []
        self.gone: set[int] = set()
        self.leaving: set[int] = set()
        self.calls: list[ModelCall] = []
        self.initial_windows: dict[int, int] = {}
        self.cut_off_at = math.inf

    # --- actions; each leaves the model as the rules say ---

    async def connect(self) -> None:
        if len(self.clients) < 3 and self.cut_off_at == math.inf:
            client = await self.serve.connect(INITIAL_WINDOW_SIZE=WINDOW)
            await client.send(wire.window_update(0, 2**30))
            self.clients.append(client)
            self.serve.nursery.start_soon(client.leave)

    def client(self, index: int) -> Client | None:
        alive = [c for i, c in enumerate(self.clients) if i not in self.gone]
        return alive[index % len(alive)] if alive else None

    def call(self, index: int) -> ModelCall | None:
        usable = [c for c in self.calls if not c.reset and self.clients.index(c.client) not in self.gone]
        usable.sort(key=lambda call: call.status is not None)  # those that have ended are less interesting
        return usable[index % len(usable)] if usable else None

    async def open(self, index: int, timeout: int) -> None:
        client = self.client(index)
        if client is None or self.cut_off_at != math.inf or self.clients.index(client) in self.leaving:
            return
        extra = [(b"grpc-timeout", b"%dS" % timeout)] if timeout else []
        deadline = trio.current_time() + timeout if timeout else math.inf
        stream_id = await client.open(end=False, extra=extra)
        self.calls.append(ModelCall(client, stream_id, deadline, window=self.initial_windows.get(id(client), WINDOW)))

    async def command(self, index: int, command: bytes) -> None:
        call = self.call(index)
        if call is not None and not call.half_closed:
            await call.client.send(wire.data(call.stream_id, framed(command)))
            call.commands.append(command)

    async def half_close(self, index: int) -> None:
        call = self.call(index)
        if call is not None and not call.half_closed:
            await call.client.send(wire.data(call.stream_id, b"", wire.END_STREAM))
            call.half_closed = True

    async def open_window(self, index: int, size: int) -> None:
        call = self.call(index)
        if call is not None:
            await call.client.send(wire.window_update(call.stream_id, size))
            call.window += size

    async def change_initial_window(self, index: int, size: int) -> None:
        client = self.client(index)
        if client is not None:
            difference = size - self.initial_windows.get(id(client), WINDOW)
            self.initial_windows[id(client)] = size
            await client.send(wire.settings([(wire.INITIAL_WINDOW_SIZE, size)]))
            for call in self.calls:
                if call.client is client:
                    call.window += difference

    async def reset(self, index: int) -> None:
        call = self.call(index)
        if call is not None:
            await call.client.send(wire.rst_stream(call.stream_id))
            call.reset = True
            call.end(CANCELLED)

    async def break_stream(self, index: int) -> None:
        """A fault that HTTP/2 makes the end of the stream."""
        call = self.call(index)
        if call is not None:
            await call.client.send(wire.window_update(call.stream_id, 0))
            call.reset = True
            call.end(INTERNAL)

    async def lose(self, index: int, how: str) -> None:
        client = self.client(index)
        if client is None:
            return
        if how == "close":
            await client.aclose()
        elif how == "broken frame":
            await client.send(wire.frame(wire.PING, 0, 0, b"?"))
        else:
            await client.send(wire.goaway(0, wire.INTERNAL_ERROR))
        self.gone.add(self.clients.index(client))
        for call in self.calls:
            if call.client is client:
                call.end(CANCELLED)

    async def leave(self, index: int) -> None:
        client = self.client(index)
        if client is not None and self.clients.index(client) not in self.leaving:
            await client.send(wire.goaway())
            self.leaving.add(self.clients.index(client))

    async def wait(self, seconds: int) -> None:
        await trio.sleep(seconds)
        now = trio.current_time()
        for call in self.calls:
            if min(call.deadline, self.cut_off_at) <= now:
                call.end(DEADLINE_EXCEEDED if call.deadline <= self.cut_off_at else UNAVAILABLE)

    async def shut_down(self, grace: int) -> None:
        self.serve.server.begin_shutdown(grace)
        self.cut_off_at = min(self.cut_off_at, trio.current_time() + grace)
        if not grace:
            for call in self.calls:
                call.end(UNAVAILABLE)

    # --- and what must hold after each ---

    async def check(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        for call in self.calls:
            call.run()
        self._forget_finished_connections()
        seen = {(call.stream_id, id(call._connection)): status for call, status in self.statuses.items()}
        expected = [call.status for call in self.calls if call.status is not None]
        assert sorted(seen.values()) == sorted(expected)
        assert self.serve.server.running_handlers == sum(call.status is None for call in self.calls)
        for call in self.calls:
            response = call.client.responses[call.stream_id]
            assert call.sent[: len(response.messages)] == response.messages
            if call.status is None:
                assert not response.closed
                assert call.sent == response.messages
            elif call.status in SENT_TO_CLIENTS and not call.reset:
                connection_gone = self.clients.index(call.client) in self.gone
                assert response.status == call.status if response.ended else connection_gone

    def _forget_finished_connections(self) -> None:
        """A connection that is leaving, or whose server is, closes with its last call."""
        for i, client in enumerate(self.clients):
            leaving = i in self.leaving or self.cut_off_at != math.inf
            if leaving and all(call.status is not None for call in self.calls if call.client is client):
                self.gone.add(i)


indexes = st.integers(0, 5)
ACTIONS = st.one_of(
    st.tuples(st.just("connect")),
    st.tuples(st.just("open"), indexes, st.sampled_from([0, 0, 3, 8])),
    st.tuples(st.just("open"), indexes, st.just(0)),
    st.tuples(st.just("command"), indexes, st.sampled_from([b"echo", b"big", b"big", b"fail", b"return", b"hang"])),
    st.tuples(st.just("command"), indexes, st.sampled_from([b"echo", b"big"])),
    st.tuples(st.just("command"), indexes, st.just(b"big")),
    st.tuples(st.just("half_close"), indexes),
    st.tuples(st.just("open_window"), indexes, st.sampled_from([1, 100, 5_000, 50_000])),
    st.tuples(st.just("open_window"), indexes, st.sampled_from([3_000, 50_000])),
    st.tuples(st.just("change_initial_window"), indexes, st.sampled_from([0, 100, 5_000, 20_000])),
    st.tuples(st.just("reset"), indexes),
    st.tuples(st.just("break_stream"), indexes),
    st.tuples(st.just("lose"), indexes, st.sampled_from(["close", "broken frame", "goaway"])),
    st.tuples(st.just("leave"), indexes),
    st.tuples(st.just("wait"), st.sampled_from([1, 4, 10])),
    st.tuples(st.just("shut_down"), st.sampled_from([0, 5])),
)
SCENARIOS = st.lists(ACTIONS, min_size=5, max_size=40)


async def play(actions: list[tuple[object, ...]]) -> None:
    statuses: dict[rpc.Call, int] = {}

    @asynccontextmanager
    async def record(call: rpc.Call) -> AsyncIterator[None]:
        try:
            yield
        finally:
            assert call not in statuses
            assert call.status is not None
            statuses[call] = call.status.int_value

    server = rpc.Server([service(obey, BIDI)], interceptors=[record])
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        scenario = Scenario(Serving(server, nursery), statuses)
        for name, *arguments in [("connect",), ("open", 0, 0), *actions]:
            await getattr(scenario, str(name))(*arguments)
            await scenario.check()
        await scenario.shut_down(0)
        await scenario.check()
        await server.shutdown(0)
        assert server.live_connections == server.live_calls == server.running_handlers == 0
        assert len(statuses) == len(scenario.calls)


def run(actions: list[tuple[object, ...]]) -> None:
    trio.run(play, actions, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCENARIOS)
def test_calls_end_as_the_rules_say_in_any_order_of_events(actions: list[tuple[object, ...]]) -> None:
    run(actions)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCENARIOS)
def test_calls_end_as_the_rules_say_in_five_thousand_orders_of_events(actions: list[tuple[object, ...]]) -> None:
    run(actions)
