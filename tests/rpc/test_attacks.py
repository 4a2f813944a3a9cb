"""Protects the server from its clients: each attack costs the attacker its own connection, and others are served all the while."""

from __future__ import annotations

import errno
import socket
import time
import tracemalloc
from contextlib import suppress

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import Client, Recorder, Serving, Statuses, framed, request_fields, service, serving
from tests.rpc.http2 import wire
from tests.rpc.http2.wire import END_HEADERS, END_STREAM
from trio_frontend import rpc

MockClock = trio.testing.MockClock


async def echo(message: BytesValue) -> BytesValue:
    return message


async def still_serves(serve: Serving) -> bool:
    client = await serve.connect()
    served = (await client.call(b"x")).messages == [b"x"]
    await client.aclose()
    return served


async def test_a_connection_that_says_nothing_is_closed_after_preface_timeout(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(preface_timeout=10)) as serve:
        client = serve.connect_silently()
        client.answers = False
        start = trio.current_time()
        await client.leave()
        assert trio.current_time() - start == 10
        assert [goaway[1] for goaway in client.goaways] == [wire.ENHANCE_YOUR_CALM]


async def test_a_preface_that_comes_byte_by_byte_does_not_buy_time(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(preface_timeout=10)) as serve:
        client = serve.connect_silently()
        client.answers = False
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.read_to_the_end)
            for byte in wire.PREFACE + wire.settings():
                if client.closed:
                    break
                await client.send(bytes([byte]))
                await trio.sleep(1)
        assert 10 <= trio.current_time() - start <= 12


async def test_a_preface_without_settings_is_none(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(preface_timeout=10)) as serve:
        client = serve.connect_silently()
        client.answers = False
        await client.send(wire.PREFACE)
        start = trio.current_time()
        await client.read_to_the_end()
        assert trio.current_time() - start == 10


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\0" * 100])
async def test_a_client_of_another_protocol_is_closed_at_once(hello: bytes) -> None:
    async with serving(service(echo)) as serve:
        client = serve.connect_silently()
        await client.send(hello)
        await client.leave()
        assert [goaway[1] for goaway in client.goaways] == [wire.PROTOCOL_ERROR]


async def test_a_header_block_that_never_ends_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(headers_timeout=10)) as serve:
        client = await serve.connect()
        await client.call(b"")
        start = trio.current_time()
        await client.send(wire.frame(wire.HEADERS, END_STREAM, 3, wire.block(request_fields())))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            for _ in range(15):
                await trio.sleep(1)
                if not client.closed:
                    await client.send(wire.frame(wire.CONTINUATION, 0, 3, b""))
        assert [goaway[1] for goaway in client.goaways] == [wire.ENHANCE_YOUR_CALM]
        assert trio.current_time() - start == 15


async def test_a_frame_that_comes_byte_by_byte_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(headers_timeout=10)) as serve:
        client = await serve.connect()
        await client.call(b"")
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            for byte in wire.headers(3):
                if client.closed:
                    break
                await client.send(bytes([byte]))
                await trio.sleep(1)
        assert 10 <= trio.current_time() - start <= 12


async def test_a_slow_upload_of_whole_frames_is_waited_for(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(headers_timeout=10, keepalive_time=1000)) as serve:
        client = await serve.connect()
        stream_id = await client.open(end=False)
        body = framed(b"x" * 100)
        frames = b"".join(wire.data(stream_id, body[i : i + 1]) for i in range(len(body)))
        for i in range(0, len(frames), 15):  # a read ends inside a frame nearly always
            await client.send(frames[i : i + 15])
            await trio.sleep(6)
        await client.send(wire.data(stream_id, b"", END_STREAM))
        assert (await client.response(stream_id)).messages == [b"x" * 100]


async def test_frames_that_are_no_events_are_progress_too(autojump_clock: MockClock) -> None:
    async with serving(service(echo), limits=rpc.ServerLimits(headers_timeout=10, keepalive_time=1000)) as serve:
        client = await serve.connect()
        frames = wire.window_update(0, 1) * 100
        for i in range(0, len(frames), 20):  # a read ends inside a frame nearly always
            await client.send(frames[i : i + 20])
            await trio.sleep(6)
        assert (await client.call(b"x")).messages == [b"x"]


async def test_streams_over_the_limit_are_refused_and_the_others_served() -> None:
    recorder = Recorder()
    limits = rpc.ServerLimits(http2=rpc.Http2Limits(max_concurrent_streams=5))
    async with serving(service(recorder), limits=limits) as serve:
        client = await serve.connect()
        streams = [await client.open(b"") for _ in range(8)]
        await client.until(lambda: sum(r.reset == wire.REFUSED_STREAM for r in client.responses.values()) == 3)
        assert recorder.started == 5
        recorder.release.set()
        for stream_id in streams[:5]:
            assert (await client.response(stream_id)).messages == [b"done"]


async def test_handlers_that_unwind_slowly_count_against_the_limit_of_streams() -> None:
    """Or a client could have any number of them by resetting its streams."""
    release = trio.Event()
    started = 0

    async def stubborn(message: BytesValue) -> BytesValue:
        nonlocal started
        started += 1
        with trio.CancelScope(shield=True):
            await release.wait()
        return message

    limits = rpc.ServerLimits(http2=rpc.Http2Limits(max_concurrent_streams=5))
    async with serving(service(stubborn), limits=limits) as serve:
        client = await serve.connect()
        for _ in range(20):
            stream_id = await client.open(b"")
            await trio.testing.wait_all_tasks_blocked()
            await client.send(wire.rst_stream(stream_id))
        await trio.testing.wait_all_tasks_blocked()
        assert started == serve.server.running_handlers == 5
        assert serve.server.live_calls == 0
        release.set()


async def test_rapid_reset_ends_the_connection_and_starts_few_handlers() -> None:
    """CVE-2023-44487."""
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), service(echo, name="test.Echo"), interceptors=[statuses]) as serve:
        client = await serve.connect()
        tasks = trio.lowlevel.current_statistics().tasks_living
        most = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            for _ in range(500):
                if client.closed:
                    break
                frames = b""
                for _ in range(100):
                    stream_id, request = client.request(b"")
                    frames += request + wire.rst_stream(stream_id)
                with trio.move_on_after(1):
                    try:
                        await client.send(frames)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        break
                await trio.lowlevel.checkpoint()
                most = max(most, trio.lowlevel.current_statistics().tasks_living)
        assert [goaway[1] for goaway in client.goaways] == [wire.ENHANCE_YOUR_CALM]
        assert most - tasks < 110
        assert recorder.started == 0  # each was reset in the read that opened it
        other = await serve.connect()
        assert (await other.call(b"x", path=b"/test.Echo/Call")).messages == [b"x"]


async def test_opening_and_resetting_a_turn_later_is_no_better(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        opened = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            while not client.closed and opened < 50_000:
                try:
                    stream_id = await client.open(b"")
                    await trio.lowlevel.checkpoint()
                    await client.send(wire.rst_stream(stream_id))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    break
                opened += 1
        assert opened < 5000
        assert recorder.started <= opened
        await trio.testing.wait_all_tasks_blocked()
        assert serve.server.running_handlers == 0


FLOODS = {
    "PING": wire.ping() * 20_000,
    "SETTINGS": wire.settings([(wire.INITIAL_WINDOW_SIZE, 1)]) * 20_000,
    "empty DATA": wire.headers(1) + wire.data(1) * 20_000,
    "PRIORITY": wire.frame(wire.PRIORITY, 0, 1, bytes(5)) * 20_000,
    "WINDOW_UPDATE": wire.window_update(0, 1) * 50_000,
    "unknown frames": wire.frame(77) * 20_000,
    "empty CONTINUATIONs": wire.frame(wire.HEADERS, 0, 1, b"") + wire.frame(wire.CONTINUATION, 0, 1) * 20_000,
    "one indexed field": wire.frame(wire.HEADERS, END_HEADERS, 1, b"\x82" * 16_000),
    "malformed requests": b"".join(wire.headers(i, [(b"x", b"y")]) for i in range(1, 40_001, 2)),
    "refused methods": b"".join(
        wire.headers(i, request_fields(path=b"/no/Such"), END_HEADERS | END_STREAM) for i in range(1, 4001, 2)
    ),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_costs_its_own_connection_and_bounded_memory_and_time(name: str) -> None:
    answers = bytearray()

    async def collect(client: Client) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while received := await client.stream.receive_some(65_536):
                answers.extend(received)

    async with serving(service(echo)) as serve:
        client = serve.connect_silently()
        flood = FLOODS[name]
        tracemalloc.start()
        started = time.thread_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, client)
            await client.start()
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                for i in range(0, len(flood), 65_536):
                    await client.send(flood[i : i + 65_536])
                    await trio.testing.wait_all_tasks_blocked()
            assert await still_serves(serve)
            if name == "refused methods":  # each a call, and answered
                nursery.cancel_scope.cancel()
        spent = time.thread_time() - started
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await client.aclose()
    assert peak < 5_000_000
    assert spent < 5
    goaways = [frame for frame in wire.read_frames(bytes(answers)) if frame.kind == wire.GOAWAY]
    codes = [int.from_bytes(goaway.payload[4:8], "big") for goaway in goaways]
    assert codes == ([] if name == "refused methods" else [wire.ENHANCE_YOUR_CALM])


async def test_connections_over_the_limit_are_closed_at_once_and_room_is_used_again() -> None:
    server = rpc.Server([service(echo)], limits=rpc.ServerLimits(max_connections=3))
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp())

        async def connect() -> Client:
            client = Client(await trio.open_tcp_stream(*address))
            await client.start()
            return client

        clients = [await connect() for _ in range(3)]
        for client in clients:
            assert (await client.call(b"x")).messages == [b"x"]
        refused = await connect()
        assert not await refused.read()
        assert server.live_connections == 3
        await clients[0].aclose()
        while server.live_connections == 3:
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        again = await connect()
        assert (await again.call(b"x")).messages == [b"x"]
        for client in [refused, again, *clients]:
            await client.aclose()
        await server.shutdown(0)


async def test_when_descriptors_run_out_the_server_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = rpc.Server([service(echo)])
    [listener] = await rpc.listen_tcp()
    failures = 2

    class Exhausted:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

        def accept(self) -> tuple[socket.socket, object]:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

    listener.socket = Exhausted(listener.socket)  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, [listener])
        client = Client(await trio.open_tcp_stream(*address))
        await client.start()
        assert (await client.call(b"x")).messages == [b"x"]
        await client.aclose()
        await server.shutdown(0)
    assert failures == 0
    assert sum("Too many open files" in record.getMessage() for record in caplog.records) == 2


async def test_a_thousand_connections_that_vanish_leave_nothing_behind() -> None:
    recorder = Recorder()
    server = rpc.Server([service(recorder)])
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp())
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(20):
            socks = [socket.create_connection(address) for _ in range(50)]
            for i, sock in enumerate(socks):
                if i % 2:
                    sock.send(wire.PREFACE + wire.settings() + wire.headers(1)[: i * 3])
                if i % 3:  # a reset in place of an end
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.close()
            with trio.fail_after(10):
                while server.live_connections or trio.lowlevel.current_statistics().tasks_living > tasks:
                    await trio.testing.wait_all_tasks_blocked(0.001)
        await server.shutdown(0)
    assert server.running_handlers == 0
