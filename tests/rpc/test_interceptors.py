"""Protects what interceptors can do: see a call and its status, refuse it, change how it ends, and be left in every case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import SERVER_STREAM, Recorder, Statuses, service, serving, value
from tests.rpc.http2 import wire
from trio_frontend import rpc


async def echo(message: BytesValue) -> BytesValue:
    return message


async def test_the_first_interceptor_is_outermost() -> None:
    order: list[str] = []

    def named(name: str) -> rpc.Interceptor:
        @asynccontextmanager
        async def interceptor(call: rpc.Call) -> AsyncIterator[None]:
            order.append(f"{name} in {call.path}")
            yield
            order.append(f"{name} out")

        return interceptor

    async with serving(service(echo), interceptors=[named("a"), named("b")]) as serve:
        client = await serve.connect()
        assert (await client.call(b"x")).messages == [b"x"]
    assert order == ["a in /test.Test/Call", "b in /test.Test/Call", "b out", "a out"]


async def test_an_interceptor_can_refuse_a_call_before_its_handler_runs() -> None:
    @asynccontextmanager
    async def authenticate(call: rpc.Call) -> AsyncIterator[None]:
        if call.metadata.get("authorization") != "Bearer good":
            raise rpc.StatusError(rpc.StatusCode.UNAUTHENTICATED, "no")
        yield

    ran = []

    async def handler(message: BytesValue) -> BytesValue:
        ran.append(message.value)
        return message

    async with serving(service(handler), interceptors=[authenticate]) as serve:
        client = await serve.connect()
        response = await client.call(b"a")
        assert (response.status, response.message, response.messages) == (16, "no", [])
        assert (await client.call(b"b", extra=[(b"authorization", b"Bearer good")])).messages == [b"b"]
    assert ran == [b"b"]


async def test_an_interceptor_sees_the_status_however_the_call_ends(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(message: BytesValue) -> BytesValue:
        if message.value == b"fail":
            raise rpc.StatusError(rpc.StatusCode.ABORTED)
        if message.value == b"break":
            raise ZeroDivisionError
        if message.value == b"hang":
            await trio.sleep_forever()
        return message

    statuses = Statuses()
    async with serving(service(handler), interceptors=[statuses]) as serve:
        client = await serve.connect()
        for content in (b"fine", b"fail", b"break"):
            await client.call(content)
        await client.call(b"hang", extra=[(b"grpc-timeout", b"1S")])
        stream_id = await client.open(b"hang")
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.rst_stream(stream_id))
        await trio.testing.wait_all_tasks_blocked()
        await client.open(b"hang")
        await trio.testing.wait_all_tasks_blocked()
    assert statuses.names == ["OK", "ABORTED", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"]


async def test_an_interceptor_can_change_the_status_and_add_trailing_metadata() -> None:
    @asynccontextmanager
    async def translate(call: rpc.Call) -> AsyncIterator[None]:
        call.set_trailing_metadata({"x-seen": "yes"})
        try:
            yield
        except KeyError as exc:
            raise rpc.StatusError(rpc.StatusCode.NOT_FOUND, str(exc)) from exc

    async def handler(message: BytesValue) -> BytesValue:
        raise KeyError("it")

    statuses = Statuses()
    async with serving(service(handler), interceptors=[statuses, translate]) as serve:
        client = await serve.connect()
        response = await client.call(b"")
        assert (response.status, response.message, response.trailers["x-seen"]) == (5, "'it'", "yes")


async def test_an_interceptor_that_fails_on_the_way_out_makes_the_call_fail(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def clumsy(call: rpc.Call) -> AsyncIterator[None]:
        yield
        raise ZeroDivisionError

    async with serving(service(echo), interceptors=[clumsy]) as serve:
        client = await serve.connect()
        assert (await client.call(b"x")).status == 13
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_an_interceptor_that_swallows_the_failure_of_a_unary_call_leaves_it_without_an_answer() -> None:
    @asynccontextmanager
    async def swallow(call: rpc.Call) -> AsyncIterator[None]:
        with suppress(ZeroDivisionError):
            yield

    async def handler(message: BytesValue) -> BytesValue:
        raise ZeroDivisionError

    async with serving(service(handler), interceptors=[swallow]) as serve:
        client = await serve.connect()
        response = await client.call(b"x")
        assert (response.status, response.message) == (13, "the method sent no answer")


async def test_an_interceptor_may_wait_and_is_cancelled_like_the_handler() -> None:
    ended = []

    @asynccontextmanager
    async def slow(call: rpc.Call) -> AsyncIterator[None]:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            ended.append("Cancelled")
            raise
        yield

    async with serving(service(echo), interceptors=[slow]) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.rst_stream(stream_id))
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["Cancelled"]


async def test_a_client_that_leaves_while_an_interceptor_is_left_is_noticed() -> None:
    ended = []

    @asynccontextmanager
    async def slow(call: rpc.Call) -> AsyncIterator[None]:
        yield
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            ended.append(call.status)
            raise

    statuses = Statuses()
    async with serving(service(echo), interceptors=[statuses, slow]) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.rst_stream(stream_id))
        await trio.testing.wait_all_tasks_blocked()
        assert len(ended) == 1
        assert serve.server.running_handlers == 0


async def test_interceptors_run_around_streams_too() -> None:
    async def two(message: BytesValue, request: rpc.Call) -> None:
        await request.send(value(b"1"))
        await request.send(value(b"2"))

    statuses = Statuses()
    async with serving(service(two, SERVER_STREAM), interceptors=[statuses]) as serve:
        client = await serve.connect()
        assert (await client.call(b"")).messages == [b"1", b"2"]
    assert statuses.names == ["OK"]


async def test_a_request_for_nothing_that_is_served_is_no_call() -> None:
    statuses = Statuses()
    async with serving(service(Recorder()), interceptors=[statuses]) as serve:
        client = await serve.connect()
        assert (await client.call(b"", path=b"/no/Such")).status == 12
    assert statuses.seen == []
