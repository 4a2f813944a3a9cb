"""Protects how calls end before their handlers do: each cause ends exactly the calls it should, at once, with the right status."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import (
    BIDI,
    CLIENT_STREAM,
    SERVER_STREAM,
    Client,
    Recorder,
    Serving,
    Statuses,
    framed,
    service,
    serving,
    value,
)
from tests.rpc.http2 import wire
from trio_frontend import rpc

MockClock = trio.testing.MockClock


async def settled() -> None:
    """Until every task waits: what ends at once has ended."""
    await trio.testing.wait_all_tasks_blocked()


async def test_rst_stream_ends_its_call_and_no_other() -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        client = await serve.connect()
        first, second = await client.open(b""), await client.open(b"")
        await recorder.until_started(2)
        await client.send(wire.rst_stream(first))
        await settled()
        assert recorder.ends == ["Cancelled"]
        assert statuses.names == ["CANCELLED"]
        recorder.release.set()
        assert (await client.response(second)).messages == [b"done"]
        assert not client.responses[first].headers
        assert client.responses[first].reset is None


async def test_rst_stream_ends_a_call_that_waits_for_its_request() -> None:
    statuses = Statuses()

    async def never(message: BytesValue) -> BytesValue:
        raise AssertionError

    async with serving(service(never), interceptors=[statuses]) as serve:
        client = await serve.connect()
        stream_id = await client.open(end=False)
        await settled()
        assert serve.server.running_handlers == 1
        await client.send(wire.rst_stream(stream_id))
        await settled()
        assert serve.server.running_handlers == 0
    assert statuses.names == ["CANCELLED"]


async def test_rst_stream_ends_a_call_that_waits_for_its_next_message() -> None:
    ended = []

    async def read(messages: rpc.Call) -> BytesValue:
        try:
            async for _ in messages:
                pass
        except trio.Cancelled:
            ended.append("Cancelled")
            raise
        return value()

    async with serving(service(read, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"a", end=False)
        await settled()
        await client.send(wire.rst_stream(stream_id))
        await settled()
        assert ended == ["Cancelled"]


async def test_rst_stream_ends_a_call_that_waits_for_a_window() -> None:
    ended = []

    async def send(message: BytesValue, request: rpc.Call) -> None:
        try:
            await request.send(value(b"x" * 100_000))
        except trio.Cancelled:
            ended.append("Cancelled")
            raise

    async with serving(service(send, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=10)
        stream_id = await client.open(b"")
        await settled()
        await client.send(wire.rst_stream(stream_id))
        await settled()
        assert ended == ["Cancelled"]


async def test_a_call_opened_and_reset_in_one_read_never_reaches_its_handler() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(b"")
        await client.send(frames, wire.rst_stream(stream_id))
        recorder.release.set()
        assert (await client.call(b"")).messages == [b"done"]
    assert recorder.started == 1


async def test_a_refused_request_that_is_reset_in_the_same_read_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.release.set()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(b"", path=b"/no/Such")
        await client.send(frames, wire.rst_stream(stream_id))
        assert (await client.call(b"")).messages == [b"done"]
    assert not caplog.records


async def test_requests_after_a_goaway_with_an_error_are_not_begun() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        frames = client.request(b"")[1]
        await client.send(wire.goaway(0, wire.PROTOCOL_ERROR), frames)
        await client.leave()
    assert recorder.started == 0


async def test_the_end_of_the_clients_bytes_ends_all_its_calls_and_no_others() -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        leaving, staying = await serve.connect(), await serve.connect()
        await leaving.open(b"")
        await leaving.open(b"")
        stream_id = await staying.open(b"")
        await recorder.until_started(3)
        await leaving.aclose()
        await settled()
        assert recorder.ends == ["Cancelled"] * 2
        assert statuses.names == ["CANCELLED"] * 2
        assert serve.server.live_connections == 1
        recorder.release.set()
        assert (await staying.response(stream_id)).status == 0


async def test_half_a_connection_is_none() -> None:
    """A client that ends its bytes and keeps reading cannot be told from one that has gone."""
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        await client.open(b"")
        await recorder.until_started()
        assert isinstance(client.stream, trio.StapledStream)
        await client.stream.send_eof()
        await settled()
        assert recorder.ends == ["Cancelled"]


async def test_end_stream_ends_a_request_and_not_its_call() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")  # with END_STREAM
        await recorder.until_started()
        await settled()
        assert recorder.ends == []
        recorder.release.set()
        assert (await client.response(stream_id)).status == 0


async def test_a_goaway_without_error_lets_calls_finish_and_then_closes() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await recorder.until_started()
        await client.send(wire.goaway())
        await settled()
        assert recorder.ends == []
        recorder.release.set()
        assert (await client.response(stream_id)).messages == [b"done"]
        await client.leave()
        await settled()
        assert serve.server.live_connections == 0


async def test_a_goaway_with_an_error_ends_all_calls() -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        client = await serve.connect()
        await client.open(b"")
        await client.open(b"")
        await recorder.until_started(2)
        await client.send(wire.goaway(0, wire.PROTOCOL_ERROR, b"you did something"))
        await settled()
        assert statuses.names == ["CANCELLED"] * 2
        await client.leave()


async def test_a_broken_frame_ends_the_connections_calls_after_a_goaway() -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        client, other = await serve.connect(), await serve.connect()
        await client.open(b"")
        await other.open(b"")
        await recorder.until_started(2)
        await client.send(wire.frame(wire.PING, 0, 0, b"short"))
        await client.leave()
        assert [code for _, code, _ in client.goaways] == [wire.FRAME_SIZE_ERROR]
        assert statuses.names == ["CANCELLED"]
        recorder.release.set()


async def test_the_deadline_cancels_the_handler_and_says_so(autojump_clock: MockClock) -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        client = await serve.connect()
        start = trio.current_time()
        response = await client.call(b"", extra=[(b"grpc-timeout", b"2500m")])
        assert trio.current_time() - start == 2.5
        assert response.status == 4
        assert recorder.ends == ["Cancelled"]
        assert statuses.names == ["DEADLINE_EXCEEDED"]


async def test_the_deadline_counts_while_the_request_is_not_complete(autojump_clock: MockClock) -> None:
    async def never(message: BytesValue) -> BytesValue:
        raise AssertionError

    async with serving(service(never)) as serve:
        client = await serve.connect()
        stream_id = await client.open(end=False, extra=[(b"grpc-timeout", b"1S")])
        response = await client.response(stream_id)
        assert response.status == 4


async def test_a_timeout_of_nothing_ends_the_call_at_its_first_wait() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        assert (await client.call(b"", extra=[(b"grpc-timeout", b"0n")])).status == 4


async def test_an_error_in_the_cleanup_of_a_cancelled_handler_changes_no_status(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def fail(message: BytesValue) -> BytesValue:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cleanup")

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        assert (await client.call(b"", extra=[(b"grpc-timeout", b"1S")])).status == 4
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_timeout_of_the_handlers_own_is_its_own_affair(autojump_clock: MockClock) -> None:
    async def patient(message: BytesValue) -> BytesValue:
        with trio.move_on_after(1):
            await trio.sleep_forever()
        return value(b"gave up")

    async with serving(service(patient)) as serve:
        client = await serve.connect()
        assert (await client.call(b"", extra=[(b"grpc-timeout", b"5S")])).messages == [b"gave up"]


async def test_cancelling_the_nursery_ends_calls_with_unavailable(autojump_clock: MockClock) -> None:
    recorder, statuses = Recorder(), Statuses()
    server = rpc.Server([service(recorder)], interceptors=[statuses])
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, [])
            serve = Serving(server, nursery)
            client = await serve.connect()
            stream_id = await client.open(b"")
            await recorder.until_started()
            outer.start_soon(client.leave)
            nursery.cancel_scope.cancel()
        assert recorder.ends == ["Cancelled"]
        assert (server.live_connections, server.running_handlers) == (0, 0)
    response = client.responses[stream_id]
    assert response.status == 14
    assert statuses.names == ["UNAVAILABLE"]


async def test_cancelling_the_nursery_of_one_stream_ends_that_stream_only(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        other = await serve.connect()
        async with trio.open_nursery() as nursery:
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(serve.server.serve_stream, theirs)
            client = Client(ours)
            await client.start()
            stream_id = await client.open(b"")
            await recorder.until_started()
            serve.nursery.start_soon(client.leave)
            nursery.cancel_scope.cancel()
        assert recorder.ends == ["Cancelled"]
        recorder.release.set()
        assert (await other.call(b"")).messages == [b"done"]
        await client.until(lambda: client.responses[stream_id].closed) if not client.closed else None
        assert client.responses[stream_id].status == 14


async def test_cancelling_the_nursery_takes_bounded_time_with_clients_that_never_close(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    server = rpc.Server([service(recorder)], limits=rpc.ServerLimits(close_timeout=3))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server.serve_stream, theirs)
        client = Client(ours)
        await client.start()
        await client.open(b"")
        await recorder.until_started()
        start = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - start <= 3
    assert recorder.ends == ["Cancelled"]


async def test_a_handler_behind_a_shield_loses_its_connection_after_the_bound(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    let_go = trio.Event()

    async def stubborn(message: BytesValue) -> BytesValue:
        with trio.CancelScope(shield=True):
            await let_go.wait()
        return value()

    async with serving(service(stubborn), limits=rpc.ServerLimits(close_timeout=2)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await settled()
        start = trio.current_time()
        serve.server.begin_shutdown(0)
        await client.leave()
        assert trio.current_time() - start <= 2
        assert client.responses[stream_id].status == 14
        await settled()
        assert serve.server.live_connections == 0
        assert serve.server.running_handlers == 1
        let_go.set()
    assert [record.getMessage() for record in caplog.records] == [
        "handler of /test.Test/Call does not end though its call has; its connection is closed"
    ]


async def test_what_waits_behind_a_shield_hears_of_the_end() -> None:
    heard: list[str] = []

    async def stubborn(messages: rpc.Call, request: rpc.Call) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:

                async def expect(call: Any, *args: Any) -> None:
                    try:
                        await call(*args)
                    except trio.BrokenResourceError:
                        heard.append(call.__name__)

                nursery.start_soon(expect, request.receive)
                nursery.start_soon(expect, request.send, value(b"x" * 100))
        assert not request.try_send_bytes(b"")

    async with serving(service(stubborn, BIDI)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=1)
        stream_id = await client.open(end=False)
        await settled()
        await client.send(wire.rst_stream(stream_id))
        await settled()
    assert sorted(heard) == ["receive", "send"]


async def test_nothing_is_sent_after_a_message_was_cut(autojump_clock: MockClock) -> None:
    async def impatient(message: BytesValue, request: rpc.Call) -> None:
        with trio.move_on_after(1):
            await request.send(value(b"x" * 1000))
        assert not request.try_send_bytes(b"")
        with pytest.raises(trio.BrokenResourceError):
            await request.send(value(b"next"))

    async with serving(service(impatient, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=10)
        response = await client.call(b"")
        assert len(response.data) == 10
        assert response.status == 13


async def test_a_response_that_ends_before_its_request_asks_the_client_to_stop() -> None:
    async def early(messages: rpc.Call) -> BytesValue:
        await trio.lowlevel.checkpoint()
        return value(b"enough")

    async with serving(service(early, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"a", end=False)
        assert (await client.response(stream_id)).messages == [b"enough"]
        # What was on its way is ignored, and costs nobody anything.
        await client.send(wire.data(stream_id, framed(b"b" * 1000)))
        assert (await client.call(b"")).messages == [b"enough"]


async def test_a_system_exit_in_a_handler_ends_the_server() -> None:
    async def leave(message: BytesValue) -> BytesValue:
        raise SystemExit(3)

    async def run() -> None:
        async with serving(service(leave)) as serve:
            client = await serve.connect()
            await client.open(b"")
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert caught.group_contains(SystemExit)


async def test_a_fault_of_the_connections_own_costs_that_connection_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client, other = await serve.connect(), await serve.connect()
        await other.open(b"")
        await recorder.until_started()

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr("trio_frontend.rpc.connection.check_request", broken)
            await client.open(b"")
            await client.read_to_the_end()
        assert serve.server.live_connections == 1
        recorder.release.set()
        assert (await other.call(b"")).messages == [b"done"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_thousands_of_calls_leave_nothing_behind() -> None:
    async def echo(message: BytesValue) -> BytesValue:
        return message

    async with serving(service(echo)) as serve:
        client = await serve.connect()
        await client.send(wire.window_update(0, 1_000_000))
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(60):
            opened = [client.request(b"x") for _ in range(50)]
            await client.send(*(frames for _, frames in opened))
            for stream_id, _ in opened:
                assert (await client.response(stream_id)).status == 0
                del client.responses[stream_id]
        await settled()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert serve.server.running_handlers == 0


@pytest.mark.parametrize("how", [b"return", b"fail", b"hang"])
async def test_a_call_that_has_ended_is_freed_without_a_garbage_collection(how: bytes) -> None:
    """A server's pauses should not grow with its calls."""

    async def handler(message: BytesValue) -> BytesValue:
        if message.value == b"fail":
            raise rpc.StatusError(rpc.StatusCode.ABORTED)
        if message.value == b"hang":
            await trio.sleep_forever()
        return message

    async with serving(service(handler)) as serve:
        client = await serve.connect()
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                stream_id = await client.open(how)
                await settled()
                await client.send(wire.rst_stream(stream_id))
                await settled()
            assert serve.server.running_handlers == 0
            assert gc.collect() < 100
        finally:
            gc.enable()
