"""Protects what a handler and its caller see of a call that goes well: the four cardinalities, messages, metadata, statuses."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator

import pytest
import trio
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from tests.rpc.harness import BIDI, CLIENT_STREAM, SERVER_STREAM, Recorder, framed, service, serving, value
from tests.rpc.http2 import wire
from trio_frontend import rpc


async def echo(message: BytesValue) -> BytesValue:
    return value(b"echo " + message.value)


async def test_a_unary_call_answers_headers_message_and_trailers() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        response = await client.call(b"hello")
        assert response.headers[0][":status"] == "200"
        assert response.headers[0]["content-type"] == "application/grpc"
        assert response.messages == [b"echo hello"]
        assert response.trailers == {"grpc-status": "0"}


async def test_a_request_cut_over_many_frames_and_reads_is_one_message() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(end=False)
        body = framed(b"x" * 300)
        for i in range(0, len(body), 7):
            frames += wire.data(stream_id, body[i : i + 7])
        frames += wire.data(stream_id, b"", wire.END_STREAM)
        for i in range(0, len(frames), 11):
            await client.send(frames[i : i + 11])
        assert (await client.response(stream_id)).messages == [b"echo " + b"x" * 300]


async def test_an_empty_message_is_a_message() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        assert (await client.call(b"")).messages == [b"echo "]


async def test_padding_is_no_part_of_a_message_and_is_given_back_to_the_window() -> None:
    async def count(messages: rpc.Call) -> BytesValue:
        return value(b"%d" % sum([len(message.value) async for message in messages]))

    async with serving(service(count, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(end=False)
        await client.send(frames)
        for _ in range(1000):  # 260 KB of it, four windows
            await client.send(wire.data(stream_id, wire.padded(framed(b"x"), 252), wire.PADDED))
            await trio.lowlevel.checkpoint()
        await client.send(wire.data(stream_id, b"", wire.END_STREAM))
        assert (await client.response(stream_id)).messages == [b"1000"]


async def test_a_streaming_handler_may_be_a_coroutine_that_sends() -> None:
    async def count(message: BytesValue, request: rpc.Call) -> None:
        for i in range(int(message.value)):
            await request.send(value(b"%d" % i))

    async with serving(service(count, SERVER_STREAM)) as serve:
        client = await serve.connect()
        assert (await client.call(b"3")).messages == [b"0", b"1", b"2"]


async def test_what_a_streaming_coroutine_returns_is_ignored() -> None:
    async def count(message: BytesValue, request: rpc.Call) -> BytesValue:
        await request.send(message)
        return value(b"not this")

    async with serving(service(count, SERVER_STREAM)) as serve:
        client = await serve.connect()
        response = await client.call(b"this")
        assert (response.messages, response.status) == ([b"this"], 0)


async def test_a_streaming_handler_may_be_an_async_generator() -> None:
    closed = []

    async def count(message: BytesValue) -> AsyncIterator[BytesValue]:
        try:
            for i in range(3):
                yield value(b"%d" % i)
        finally:
            closed.append(True)

    async with serving(service(count, SERVER_STREAM)) as serve:
        client = await serve.connect()
        assert (await client.call(b"")).messages == [b"0", b"1", b"2"]
    assert closed == [True]


async def test_an_async_generator_is_closed_in_its_own_task_when_the_caller_cancels() -> None:
    closed_in = []

    async def endless(message: BytesValue, request: rpc.Call) -> AsyncIterator[BytesValue]:
        task = trio.lowlevel.current_task()
        try:
            while True:
                yield value(b"again")
                await trio.lowlevel.checkpoint()
        finally:
            closed_in.append(trio.lowlevel.current_task() is task)

    async with serving(service(endless, SERVER_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await client.until(lambda: len(client.responses[stream_id].messages) > 2)
        await client.send(wire.rst_stream(stream_id))
        while serve.server.running_handlers:
            await trio.lowlevel.checkpoint()
        assert closed_in == [True]


async def test_a_stream_without_messages_ends_in_one_block_of_headers() -> None:
    async def nothing(message: BytesValue, request: rpc.Call) -> None:
        await trio.lowlevel.checkpoint()

    async with serving(service(nothing, SERVER_STREAM)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert len(response.headers) == 1
        assert response.headers[0][":status"] == "200"
        assert response.status == 0


async def test_client_streaming_iterates_over_the_messages_until_the_caller_ends() -> None:
    async def join(messages: rpc.Call) -> BytesValue:
        return value(b" ".join([message.value async for message in messages]))

    async with serving(service(join, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"a", b"b", end=False)
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.data(stream_id, framed(b"c"), wire.END_STREAM))
        assert (await client.response(stream_id)).messages == [b"a b c"]


async def test_bidirectional_streaming_answers_each_message_before_the_next_comes() -> None:
    async def each(messages: rpc.Call, request: rpc.Call) -> None:
        async for message in messages:
            await request.send(value(b"got " + message.value))

    async with serving(service(each, BIDI)) as serve:
        client = await serve.connect()
        stream_id = await client.open(end=False)
        for i in range(3):
            await client.send(wire.data(stream_id, framed(b"%d" % i)))
            await client.until(lambda i=i: len(client.responses[stream_id].messages) == i + 1)
        await client.send(wire.data(stream_id, b"", wire.END_STREAM))
        response = await client.response(stream_id)
        assert response.messages == [b"got 0", b"got 1", b"got 2"]
        assert response.status == 0


async def test_end_of_request_by_trailers_is_an_end_of_request() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(b"x", end=False)
        trailers = wire.headers(stream_id, [(b"x-checksum", b"1")], wire.END_HEADERS | wire.END_STREAM)
        await client.send(frames, trailers)
        assert (await client.response(stream_id)).messages == [b"echo x"]


async def test_receive_gives_none_after_the_last_message() -> None:
    got = []

    async def take(messages: rpc.Call, request: rpc.Call) -> BytesValue:
        got.append((await request.receive()).value)
        got.append(await request.receive())
        got.append(await request.receive())
        return value()

    async with serving(service(take, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        await client.call(b"only")
    assert got == [b"only", None, None]


async def test_two_tasks_may_not_receive_from_one_call() -> None:
    async def twice(messages: rpc.Call, request: rpc.Call) -> BytesValue:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(request.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await request.receive()
            nursery.cancel_scope.cancel()
        return value()

    async with serving(service(twice, CLIENT_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(end=False)
        assert (await client.response(stream_id)).status == 0


async def test_messages_that_two_tasks_send_do_not_mix() -> None:
    async def two(message: BytesValue, request: rpc.Call) -> None:
        async with trio.open_nursery() as nursery:
            for letter in (b"a", b"b", b"c"):
                nursery.start_soon(request.send, value(letter * 50_000))

    async with serving(service(two, SERVER_STREAM)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=1000)
        stream_id = await client.open(b"")
        await client.send(wire.window_update(0, 10_000_000))
        response = client.responses[stream_id]
        while not response.closed:
            await client.send(wire.window_update(stream_id, 5000))
            await client.read()
        assert sorted(response.messages) == [b"a" * 50_000, b"b" * 50_000, b"c" * 50_000]


async def test_metadata_reaches_the_handler_and_reserved_fields_do_not() -> None:
    seen = []

    async def look(message: BytesValue, request: rpc.Call) -> BytesValue:
        seen.append(request)
        return value()

    extra = [
        (b"x-id", b"1"),
        (b"x-id", b"2"),
        (b"x-raw-bin", b"AAEC"),
        (b"x-raw-bin", b"/w,/g=="),
        (b"user-agent", b"test/1"),
        (b"grpc-timeout", b"5S"),
        (b"grpc-accept-encoding", b"gzip"),
    ]
    async with serving(service(look)) as serve:
        client = await serve.connect()
        await client.call(b"", extra=extra)
    [call] = seen
    assert list(call.metadata) == ["x-id", "x-raw-bin", "user-agent"]
    assert call.metadata["x-id"] == "1"
    assert call.metadata.get_all("x-id") == ["1", "2"]
    assert call.metadata.get_all("x-raw-bin") == [b"\0\1\2", b"\xff", b"\xfe"]
    assert call.custom_metadata[0] == ("x-id", "1")
    assert call.authority == "localhost:50051"
    assert call.peer == "stream"
    assert call.peer_certificate is None
    assert (call.path, call.service_name, call.method_name) == ("/test.Test/Call", "test.Test", "Call")


async def test_metadata_goes_out_with_headers_and_trailers() -> None:
    async def answer(message: BytesValue, request: rpc.Call) -> BytesValue:
        await request.send_initial_metadata({"x-first": "early", "x-first-bin": b"\xff"})
        with pytest.raises(RuntimeError):
            await request.send_initial_metadata({})
        request.set_trailing_metadata([("x-last", "late"), ("x-last-bin", b"\0")])
        return value(b"between")

    async with serving(service(answer)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert response.headers[0]["x-first"] == "early"
        assert base64.b64decode(response.headers[0]["x-first-bin"] + "==") == b"\xff"
        assert response.messages == [b"between"]
        assert response.trailers == {"grpc-status": "0", "x-last": "late", "x-last-bin": "AA"}


async def test_trailing_metadata_goes_out_with_an_error_too() -> None:
    async def fail(message: BytesValue, request: rpc.Call) -> BytesValue:
        request.set_trailing_metadata({"retry-after": "3"})
        raise rpc.StatusError(rpc.StatusCode.UNAVAILABLE, "busy")

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert (response.status, response.message, response.trailers["retry-after"]) == (14, "busy", "3")


async def test_a_status_error_ends_the_call_with_its_status_and_details() -> None:
    detail = StringValue(value="try the other one")

    async def fail(message: BytesValue) -> BytesValue:
        raise rpc.StatusError(rpc.StatusCode.NOT_FOUND, "no model „x“\n100%", [detail])

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert response.status == 5
        assert response.message == "no model %E2%80%9Ex%E2%80%9C%0A100%25"
        packed = base64.b64decode(response.trailers["grpc-status-details-bin"] + "==")
        assert b"type.googleapis.com/google.protobuf.StringValue" in packed
        assert detail.SerializeToString() in packed


async def test_purerpcs_own_errors_keep_their_status() -> None:
    from purerpc.grpclib.exceptions import FailedPreconditionError

    async def fail(message: BytesValue) -> BytesValue:
        raise FailedPreconditionError("not now")

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert (response.status, response.message) == (9, "not now")


async def test_messages_sent_before_an_error_are_delivered() -> None:
    async def some(message: BytesValue, request: rpc.Call) -> None:
        await request.send(value(b"one"))
        raise rpc.StatusError(rpc.StatusCode.ABORTED, "then this")

    async with serving(service(some, SERVER_STREAM)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert (response.messages, response.status) == ([b"one"], 10)


async def test_a_handlers_own_failure_is_internal_without_its_text_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(message: BytesValue) -> BytesValue:
        raise KeyError("password=hunter2")

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert response.status == 13
        assert "hunter2" not in response.message
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert "/test.Test/Call" in errors[0].getMessage()


async def test_a_status_error_out_of_a_nursery_is_found_in_its_group() -> None:
    async def fail(message: BytesValue) -> BytesValue:
        async def child() -> None:
            raise rpc.StatusError(rpc.StatusCode.DATA_LOSS, "inside")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            await trio.sleep_forever()
        raise AssertionError

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert (response.status, response.message) == (15, "inside")


async def test_a_status_error_beside_a_failure_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(message: BytesValue) -> BytesValue:
        raise ExceptionGroup("both", [rpc.StatusError(rpc.StatusCode.ABORTED, "a"), ValueError("b")])

    async with serving(service(fail)) as serve:
        client = await serve.connect()
        assert (await client.call(b"")).status == 13
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_unary_handler_that_returns_no_message_is_internal(caplog: pytest.LogCaptureFixture) -> None:
    async def forget(message: BytesValue) -> None:
        await trio.lowlevel.checkpoint()

    async with serving(service(forget)) as serve:
        client = await serve.connect()
        assert (await client.call(b"")).status == 13


async def test_the_deadline_is_counted_from_the_headers(autojump_clock: trio.testing.MockClock) -> None:
    seen = []

    async def look(message: BytesValue, request: rpc.Call) -> BytesValue:
        seen.append((request.deadline, request.time_remaining()))
        return value()

    async with serving(service(look)) as serve:
        client = await serve.connect()
        start = trio.current_time()
        stream_id = await client.open(end=False, extra=[(b"grpc-timeout", b"10S")])
        await trio.sleep(4)
        await client.send(wire.data(stream_id, framed(), wire.END_STREAM))
        await client.response(stream_id)
        await client.call(b"")
    assert seen[0] == (start + 10, 6)
    assert seen[1] == (math.inf, math.inf)


async def test_calls_of_one_connection_run_side_by_side() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        streams = [await client.open(b"") for _ in range(20)]
        await recorder.until_started(20)
        assert serve.server.live_calls == serve.server.running_handlers == 20
        recorder.release.set()
        for stream_id in streams:
            assert (await client.response(stream_id)).messages == [b"done"]
        assert serve.server.live_calls == 0


async def test_a_servicer_is_as_good_as_its_service() -> None:
    import purerpc

    class Servicer(purerpc.Servicer):  # type: ignore[misc]
        @property
        def service(self) -> purerpc.Service:
            return service(echo)

    async with serving(Servicer()) as serve:
        client = await serve.connect()
        assert (await client.call(b"x")).messages == [b"echo x"]


def test_a_service_given_twice_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"test\.Test is given twice"):
        rpc.Server([service(echo), service(echo)])


def test_what_is_no_service_is_refused() -> None:
    with pytest.raises(TypeError, match="no purerpc Service"):
        rpc.Server([object()])  # type: ignore[list-item]
