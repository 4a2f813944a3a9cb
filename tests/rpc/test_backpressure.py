"""Protects backpressure both ways: who waits for whom, what others notice of it, and how many bytes it costs."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import BIDI, CLIENT_STREAM, SERVER_STREAM, Client, Statuses, framed, service, serving, value
from tests.rpc.http2 import wire
from trio_frontend import rpc

MockClock = trio.testing.MockClock
MESSAGE = value(b"x" * 990)
FRAMED = 5 + len(MESSAGE.SerializeToString())


class Producer:
    """Sends MESSAGE for ever, and counts."""

    def __init__(self) -> None:
        self.sent: dict[bytes, int] = {}

    async def __call__(self, message: BytesValue, request: rpc.Call) -> None:
        self.sent[message.value] = 0
        while True:
            await request.send(MESSAGE)
            self.sent[message.value] += 1


async def test_a_call_waits_when_its_streams_window_is_closed_and_others_go_on() -> None:
    producer = Producer()
    async with serving(service(producer, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=FRAMED * 3)
        await client.send(wire.window_update(0, 10_000_000))
        await client.open(b"stalled")
        reading = await client.open(b"reading")
        response = client.responses[reading]
        for i in range(50):
            await client.until(lambda i=i: len(response.messages) >= i)
            await client.send(wire.window_update(reading, FRAMED))
        await trio.testing.wait_all_tasks_blocked()
        assert producer.sent[b"stalled"] == 3
        assert producer.sent[b"reading"] == 53


async def test_a_call_waits_when_the_connections_window_is_closed_and_goes_on_when_it_opens() -> None:
    producer = Producer()
    async with serving(service(producer, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=1_000_000)
        await client.open(b"a")
        await client.open(b"b")
        await trio.testing.wait_all_tasks_blocked()
        sent = sum(producer.sent.values())
        assert sent == 65_535 // FRAMED
        await client.send(wire.window_update(0, 10 * FRAMED))
        await trio.testing.wait_all_tasks_blocked()
        assert sent + 9 <= sum(producer.sent.values()) <= sent + 11
        assert all(producer.sent.values())


async def test_a_message_larger_than_any_window_goes_out_in_pieces() -> None:
    content = bytes(range(256)) * 4000

    async def large(message: BytesValue, request: rpc.Call) -> None:
        await request.send(value(content))

    async with serving(service(large, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=10_000)
        stream_id = await client.open(b"")
        response = client.responses[stream_id]
        while not response.closed:
            await client.read()
            await client.send(wire.window_update(0, 9_000), wire.window_update(stream_id, 9_000))
        assert response.messages == [content]


async def test_a_window_made_negative_by_settings_holds_messages_back_and_no_trailers() -> None:
    go_on = trio.Event()

    async def two(message: BytesValue, request: rpc.Call) -> None:
        await request.send(value(b"x" * 500))
        await go_on.wait()
        assert not request.try_send_bytes(b"")
        if message.value == b"fail":
            raise rpc.StatusError(rpc.StatusCode.ABORTED)
        await request.send(value(b"y" * 10))

    async with serving(service(two, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=1000)
        first, second = await client.open(b""), await client.open(b"fail")
        await client.until(lambda: all(client.responses[i].messages for i in (first, second)))
        await client.send(wire.settings([(wire.INITIAL_WINDOW_SIZE, 100)]))
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        assert (await client.response(second)).status == 10
        assert not client.responses[first].closed
        await client.send(wire.window_update(first, 450))
        assert (await client.response(first)).messages == [b"x" * 500, b"y" * 10]


async def test_a_zero_window_held_open_ends_the_call_after_send_timeout(autojump_clock: MockClock) -> None:
    producer, statuses = Producer(), Statuses()
    limits = rpc.ServerLimits(send_timeout=30)
    async with serving(service(producer, SERVER_STREAM), limits=limits, interceptors=[statuses]) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=0)
        start = trio.current_time()
        response = await client.call(b"")
        assert trio.current_time() - start == 30
        assert response.status == 8
    assert statuses.names == ["RESOURCE_EXHAUSTED"]


async def test_a_window_opened_byte_by_byte_does_not_hold_a_call_open(autojump_clock: MockClock) -> None:
    producer = Producer()
    async with serving(service(producer, SERVER_STREAM), limits=rpc.ServerLimits(send_timeout=30)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=0)
        stream_id = await client.open(b"")
        start = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def dribble() -> None:
                while True:
                    await client.send(wire.window_update(stream_id, 1))
                    await trio.sleep(1)

            nursery.start_soon(dribble)
            await client.response(stream_id)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - start == 30
        assert client.responses[stream_id].status == 8


async def test_a_request_is_given_back_to_the_window_as_the_handler_takes_it() -> None:
    take = trio.Event()
    got = []

    async def slow(messages: rpc.Call) -> BytesValue:
        await take.wait()
        async for message in messages:
            got.append(len(message.value))
        return value()

    limits = rpc.ServerLimits(http2=rpc.Http2Limits(stream_window=65_536))
    async with serving(service(slow, CLIENT_STREAM), limits=limits) as serve:
        client = await serve.connect()
        updates = []
        inner = client._act_on

        async def act_on(frame: wire.Frame) -> None:
            if frame.kind == wire.WINDOW_UPDATE and frame.stream_id:
                updates.append(int.from_bytes(frame.payload, "big"))
            await inner(frame)

        client._act_on = act_on  # type: ignore[method-assign]
        stream_id = await client.open(end=False)
        message = framed(b"x" * 8000)
        for _ in range(8):
            await client.send(wire.data(stream_id, message))
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.ping())
        await client.read()
        assert updates == []  # the handler has taken nothing
        take.set()
        await client.until(lambda: sum(updates) > 32_768)
        await client.send(wire.data(stream_id, message, wire.END_STREAM))
        assert (await client.response(stream_id)).status == 0
    assert got == [8000] * 9


async def test_a_handler_that_reads_nothing_lets_a_second_call_through() -> None:
    async def ignore(messages: rpc.Call) -> BytesValue:
        first = await messages.receive()
        if first.value == b"ignore":
            await trio.sleep_forever()
        return value(b"%d" % sum([len(message.value) async for message in messages]))

    async with serving(service(ignore, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        ignored = await client.open(b"ignore", end=False)
        await client.send(*(wire.data(ignored, b"x" * 10_000) for _ in range(6)))
        counted = await client.open(b"count", end=False)
        for _ in range(100):
            await client.send(wire.data(counted, framed(b"x" * 1000)))
            await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.data(counted, b"", wire.END_STREAM))
        assert (await client.response(counted)).messages == [b"100000"]
        await client.send(wire.rst_stream(ignored))


@asynccontextmanager
async def over_sockets(
    *services: object, limits: rpc.ServerLimits | None = None
) -> AsyncIterator[tuple[rpc.Server, Client]]:
    """A server on a TCP port, and a client; on both sides the kernel takes little before it is read."""
    server = rpc.Server(services, limits=limits)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        [listener] = await rpc.listen_tcp()
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            listener.socket.setsockopt(socket.SOL_SOCKET, option, 32_768)
        [address] = await nursery.start(server.serve, [listener])
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
        sock.connect(address)
        sock.setblocking(False)
        client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
        await client.start(INITIAL_WINDOW_SIZE=2**31 - 1)
        await client.send(wire.window_update(0, 2**31 - 1 - 65_535))
        yield server, client
        await client.aclose()
        await server.shutdown(0)


async def stalled(producer: Producer) -> int:
    """Wait until the producer can send no more; how much it has sent."""
    before = -1
    while before != (now := sum(producer.sent.values())) or not now:
        before = now
        await trio.testing.wait_all_tasks_blocked(0.05)
    return now


async def test_a_client_that_reads_nothing_costs_the_send_buffer_and_one_frame() -> None:
    producer = Producer()
    limits = rpc.ServerLimits(send_buffer=50_000)
    async with over_sockets(service(producer, SERVER_STREAM), limits=limits) as (server, client):
        for i in range(20):
            await client.open(b"%d" % i)
        await stalled(producer)
        [connection] = server._connections
        # What is being written, and what waits behind it.
        assert 50_000 <= connection.outbox.backlog <= 2 * (50_000 + 16_384 + 9)


async def test_calls_of_a_client_that_reads_again_go_on_and_have_their_turns() -> None:
    producer = Producer()
    async with over_sockets(service(producer, SERVER_STREAM)) as (_, client):
        streams = [await client.open(b"%d" % i) for i in range(10)]
        await stalled(producer)
        before = dict(producer.sent)
        await client.until(lambda: all(len(client.responses[i].messages) > 100 for i in streams))
        assert all(producer.sent[key] > before[key] for key in before)
        # None is ahead by more than the luck of a few turns.
        counts = sorted(producer.sent.values())
        assert counts[-1] < 3 * counts[0]


async def test_one_huge_message_leaves_room_for_small_ones() -> None:
    async def either(message: BytesValue, request: rpc.Call) -> None:
        if message.value == b"huge":
            await request.send(value(bytes(8_000_000)))
        else:
            for _ in range(20):
                await request.send(value(b"small"))

    async with over_sockets(service(either, SERVER_STREAM)) as (_, client):
        huge = await client.open(b"huge")
        await client.until(lambda: len(client.responses[huge].data) > 100_000)
        small = await client.open(b"small")
        await client.response(small)
        assert len(client.responses[huge].data) < 6_000_000
        assert (await client.response(huge)).status == 0


async def test_a_client_that_reads_nothing_is_closed_after_write_timeout() -> None:
    producer = Producer()
    async with over_sockets(
        service(producer, SERVER_STREAM), limits=rpc.ServerLimits(write_timeout=0.2, close_timeout=0.1)
    ) as (server, client):
        await client.open(b"")
        await stalled(producer)
        with trio.fail_after(5):
            while server.live_connections:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert server.running_handlers == 0


async def test_a_shutdown_does_not_wait_for_a_client_that_reads_nothing(caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer()
    limits = rpc.ServerLimits(close_timeout=0.2)
    async with over_sockets(service(producer, SERVER_STREAM), limits=limits) as (server, client):
        await client.open(b"")
        await stalled(producer)
        with trio.fail_after(5):
            await server.shutdown(0)
        assert server.running_handlers == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_reading_stops_while_answers_pile_up_and_goes_on_when_they_are_read() -> None:
    limits = rpc.ServerLimits(
        send_buffer=10_000,
        http2=rpc.Http2Limits(max_unsent=20_000, max_ping_strikes=10**9, settings=rpc.Rate(1e6, 10**6)),
    )

    async def echo(message: BytesValue) -> BytesValue:
        return message

    async with over_sockets(service(echo), limits=limits) as (server, client):
        sent = 0
        client.answers = False  # it would wait for the flood, and stop reading

        async def flood() -> None:
            nonlocal sent
            for _ in range(60):
                await client.send(wire.ping() * 1000)
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            before = -1
            while before != sent:
                before = sent
                await trio.testing.wait_all_tasks_blocked(0.05)
            assert 0 < sent < 60
            [connection] = server._connections
            assert 20_000 < connection.outbox.backlog < 20_000 + 2 * 65_536
            nursery.start_soon(client.until, lambda: sent == 60)
        assert (await client.call(b"x")).messages == [b"x"]


async def test_a_bidirectional_call_whose_client_does_not_read_still_receives() -> None:
    got = []

    async def both(messages: rpc.Call, request: rpc.Call) -> None:
        async with trio.open_nursery() as nursery:

            async def produce() -> None:
                while True:
                    await request.send(MESSAGE)

            nursery.start_soon(produce)
            async for message in messages:
                got.append(message.value)
            nursery.cancel_scope.cancel()

    async with serving(service(both, BIDI)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=100)
        stream_id = await client.open(end=False)
        for i in range(10):
            await client.send(wire.data(stream_id, framed(b"%d" % i)))
        await client.send(wire.data(stream_id, b"", wire.END_STREAM))
        await client.response(stream_id)
    assert got == [b"%d" % i for i in range(10)]


@pytest.mark.parametrize("limit", [rpc.ServerLimits(send_buffer=1)])
async def test_the_smallest_send_buffer_still_lets_everything_through(limit: rpc.ServerLimits) -> None:
    async def ten(message: BytesValue, request: rpc.Call) -> None:
        for i in range(10):
            await request.send(value(b"%d" % i * 3000))

    async with serving(service(ten, SERVER_STREAM), limits=limit) as serve:
        client = await serve.connect()
        assert [message[:1] for message in (await client.call(b"")).messages] == [b"%d" % i for i in range(10)]
