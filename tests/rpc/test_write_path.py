"""Protects the fast path out: framed there and then, written once per connection and loop turn, and never a wait in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import SERVER_STREAM, Recorder, framed, request_fields, service, serving, value
from tests.rpc.http2 import wire
from tests.rpc.http2.wire import END_HEADERS, END_STREAM
from trio_frontend import rpc
from trio_frontend.rpc.connection import Connection

SMALL = value(b"x").SerializeToString()


class Kernel:
    """A transport that takes at once what the test lets it, and keeps what it took, write by write."""

    peer = "test"
    sends_at_once = True
    peer_certificate: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self.room = 10**9
        self.writes: list[bytes] = []
        self.broken = False
        self._in, self._received = trio.open_memory_channel[bytes](100)
        self._room_made = trio.Event()

    def give(self, data: bytes) -> None:
        self._in.send_nowait(data)

    def make_room(self, size: int) -> None:
        self.room += size
        self._room_made.set()
        self._room_made = trio.Event()

    async def handshake(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> bytes:
        try:
            return await self._received.receive()
        except trio.EndOfChannel:
            return b""

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        if self.broken:
            raise trio.BrokenResourceError("reset")
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        if taken:
            self.writes.append(taken)
        return len(taken)

    async def send_all(self, data: bytes) -> None:
        rest = data
        while True:
            rest = rest[self.send_now(rest) :]
            if not rest:
                return
            await self._room_made.wait()

    async def send_eof(self) -> None:
        self._in.close()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        pass

    @property
    def data(self) -> bytes:
        """The DATA that was written."""
        frames = wire.read_frames(b"".join(self.writes))
        return b"".join(frame.payload for frame in frames if frame.kind == wire.DATA)


def requests(*stream_ids: int) -> bytes:
    fields = request_fields()
    return b"".join(wire.headers(i, fields, END_HEADERS) + wire.data(i, framed(b"%d" % i), END_STREAM) for i in stream_ids)


HELLO = wire.PREFACE + wire.settings() + wire.frame(wire.SETTINGS, wire.ACK)


@asynccontextmanager
async def connected(server: rpc.Server, *kernels: Kernel) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        for kernel in kernels:
            nursery.start_soon(Connection(server, kernel).run)
            kernel.give(HELLO)
        await trio.testing.wait_all_tasks_blocked()
        for kernel in kernels:
            kernel.writes.clear()
        yield
        await server.shutdown(0)


async def test_a_unary_answer_is_one_write_of_headers_message_and_trailers() -> None:
    async def echo(message: BytesValue) -> BytesValue:
        return message

    kernel = Kernel()
    async with connected(rpc.Server([service(echo)]), kernel):
        kernel.give(requests(1))
        await trio.testing.wait_all_tasks_blocked()
        assert len(kernel.writes) == 1
        kinds = [(frame.kind, frame.flags) for frame in wire.read_frames(kernel.writes[0])]
        assert kinds == [(wire.HEADERS, END_HEADERS), (wire.DATA, 0), (wire.HEADERS, END_HEADERS | END_STREAM)]


async def test_the_answers_of_one_loop_turn_are_one_write_for_each_connection() -> None:
    async def echo(message: BytesValue) -> BytesValue:
        return message

    first, second = Kernel(), Kernel()
    async with connected(rpc.Server([service(echo)]), first, second):
        first.give(requests(*range(1, 41, 2)))
        second.give(requests(1, 3))
        await trio.testing.wait_all_tasks_blocked()
        assert [len(first.writes), len(second.writes)] == [1, 1]


async def test_another_task_fills_many_calls_and_each_connection_is_written_once() -> None:
    calls: list[rpc.Call] = []

    async def wait(message: BytesValue, request: rpc.Call) -> None:
        calls.append(request)
        await trio.sleep_forever()

    first, second = Kernel(), Kernel()
    async with connected(rpc.Server([service(wait, SERVER_STREAM)]), first, second):
        first.give(requests(*range(1, 101, 2)))
        second.give(requests(*range(1, 101, 2)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(calls) == 100
        assert not first.writes
        assert all(call.try_send_bytes(SMALL) for call in calls)
        assert not first.writes  # nothing is written in the caller's turn
        await trio.testing.wait_all_tasks_blocked()
        assert [len(first.writes), len(second.writes)] == [1, 1]
        assert first.data == framed(b"x") * 50


async def test_what_the_kernel_does_not_take_goes_out_in_order_once_it_does() -> None:
    calls: list[rpc.Call] = []

    async def wait(message: BytesValue, request: rpc.Call) -> None:
        calls.append(request)
        await trio.sleep_forever()

    kernel = Kernel()
    async with connected(rpc.Server([service(wait, SERVER_STREAM)]), kernel):
        kernel.give(requests(1))
        await trio.testing.wait_all_tasks_blocked()
        [call] = calls
        expected = b""
        kernel.room = 20
        for i in range(200):
            assert call.try_send_bytes(value(b"%d" % i).SerializeToString())
            expected += framed(b"%d" % i)
            if i % 10 == 0:
                kernel.make_room(7)
            await trio.testing.wait_all_tasks_blocked()
        kernel.make_room(10**9)
        await trio.testing.wait_all_tasks_blocked()
        assert kernel.data == expected


async def test_the_fast_path_declines_what_it_cannot_do_at_once_and_the_plain_path_does_it() -> None:
    declined: list[str] = []

    async def handler(message: BytesValue, request: rpc.Call) -> None:
        large = value(b"y" * 20_000).SerializeToString()
        if not request.try_send_bytes(large):
            declined.append("larger than a frame")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(request.send_bytes, large)
            await trio.testing.wait_all_tasks_blocked()
            if not request.try_send_bytes(SMALL):
                declined.append("a message of the same call waits")
        await request.send_bytes(SMALL)

    async with serving(service(handler, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=19_000)
        stream_id = await client.open(b"")
        await client.until(lambda: len(client.responses[stream_id].data) == 19_000)
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.window_update(stream_id, 100_000))
        assert (await client.response(stream_id)).messages == [b"y" * 20_000, b"x"]
    assert declined == ["larger than a frame", "a message of the same call waits"]


async def test_the_fast_path_declines_when_the_buffer_is_full_or_the_call_has_ended() -> None:
    calls: list[rpc.Call] = []

    async def wait(message: BytesValue, request: rpc.Call) -> None:
        calls.append(request)
        await trio.sleep_forever()

    kernel = Kernel()
    async with connected(rpc.Server([service(wait, SERVER_STREAM)], limits=rpc.ServerLimits(send_buffer=1000)), kernel):
        kernel.give(requests(1, 3))
        await trio.testing.wait_all_tasks_blocked()
        first, second = calls
        kernel.room = 0
        framed_size = 9 + len(framed(b"z" * 200))
        sent = 0
        while first.try_send_bytes(value(b"z" * 200).SerializeToString()):
            sent += framed_size
        assert 1000 - framed_size < sent < 1000 + framed_size
        assert not second.try_send_bytes(SMALL)
        kernel.make_room(10**9)
        await trio.testing.wait_all_tasks_blocked()
        assert second.try_send_bytes(SMALL)
        kernel.give(wire.rst_stream(first.stream_id))
        await trio.testing.wait_all_tasks_blocked()
        assert not first.try_send_bytes(SMALL)
        assert second.try_send_bytes(SMALL)


async def test_a_transport_that_breaks_under_the_write_ends_its_calls_and_no_others() -> None:
    recorder = Recorder()
    breaking, other = Kernel(), Kernel()
    server = rpc.Server([service(recorder)])
    async with connected(server, breaking, other):
        breaking.give(requests(1, 3))
        other.give(requests(1))
        await recorder.until_started(3)
        breaking.broken = True
        breaking.give(wire.ping())
        await trio.testing.wait_all_tasks_blocked()
        assert recorder.ends == ["Cancelled"] * 2
        assert server.live_connections == 1
        recorder.release.set()


async def test_a_transport_that_breaks_under_the_writer_ends_its_calls() -> None:
    recorder = Recorder()
    kernel = Kernel()
    server = rpc.Server([service(recorder)])
    async with connected(server, kernel):
        kernel.room = 5
        kernel.give(requests(1) + wire.ping())
        await recorder.until_started()
        await trio.testing.wait_all_tasks_blocked()
        kernel.broken = True
        kernel.make_room(0)
        await trio.testing.wait_all_tasks_blocked()
        assert recorder.ends == ["Cancelled"]
        assert server.live_connections == 0


async def test_a_call_that_sends_takes_no_place_from_the_others_when_it_is_cancelled_in_line() -> None:
    """Whoever leaves the line, served or not, leaves it moving."""

    async def large(message: BytesValue, request: rpc.Call) -> None:
        await request.send(value(b"l" * 40_000))

    kernel = Kernel()
    server = rpc.Server([service(large, SERVER_STREAM)], limits=rpc.ServerLimits(send_buffer=5000))
    async with connected(server, kernel):
        kernel.give(wire.window_update(0, 10**9) + wire.settings([(wire.INITIAL_WINDOW_SIZE, 10**6)]))
        kernel.room = 0
        kernel.give(requests(*range(1, 21, 2)))
        await trio.testing.wait_all_tasks_blocked()
        for stream_id in range(1, 11, 2):
            kernel.give(wire.rst_stream(stream_id))
            kernel.make_room(3000)
            await trio.testing.wait_all_tasks_blocked()
        kernel.make_room(10**9)
        await trio.testing.wait_all_tasks_blocked()
        assert server.running_handlers == 0
        ended = [
            frame.stream_id
            for frame in wire.read_frames(b"".join(kernel.writes))
            if frame.kind == wire.HEADERS and frame.flags & END_STREAM
        ]
        assert sorted(ended) == list(range(11, 21, 2))
