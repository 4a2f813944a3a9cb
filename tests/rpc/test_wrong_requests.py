"""Protects the answers to wrong requests: each ends its own call with the status the gRPC spec gives it, and never the connection."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable

import pytest
import trio
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import (
    CLIENT_STREAM,
    SERVER_STREAM,
    UNARY,
    Client,
    Response,
    framed,
    request_fields,
    service,
    serving,
    value,
)
from tests.rpc.http2 import wire
from trio_frontend import rpc

LIMITS = rpc.ServerLimits(max_message_size=100_000)


async def echo(message: BytesValue) -> BytesValue:
    return value(b"echo " + message.value)


async def never(message: BytesValue, request: rpc.Call) -> BytesValue:
    raise AssertionError("a wrong request reached the handler")


async def answer(client: Client, fields: Iterable[tuple[bytes, bytes]], body: bytes = framed()) -> Response:
    """The response to a request with exactly these headers."""
    stream_id, client.next_id = client.next_id, client.next_id + 2
    client.responses[stream_id] = Response()
    await client.send(wire.headers(stream_id, fields), wire.data(stream_id, body, wire.END_STREAM))
    return await client.response(stream_id)


WRONG_HEADERS = {
    "no POST": ([(b":method", b"GET"), *request_fields(without=[b":method"])], "405", 2),
    "no content type": (request_fields(without=[b"content-type"]), "415", 2),
    "another content type": (
        request_fields(without=[b"content-type"], extra=[(b"content-type", b"application/json")]),
        "415",
        2,
    ),
    "gRPC-web": (
        request_fields(without=[b"content-type"], extra=[(b"content-type", b"application/grpc-web+proto")]),
        "415",
        2,
    ),
    "gRPC in JSON": (
        request_fields(without=[b"content-type"], extra=[(b"content-type", b"application/grpc+json")]),
        "415",
        2,
    ),
    "no te": (request_fields(without=[b"te"]), "400", 13),
    "a path without a method": (request_fields(path=b"/test.Test"), "200", 12),
    "a path without a service": (request_fields(path=b"//Call"), "200", 12),
    "a path of one slash": (request_fields(path=b"/"), "200", 12),
    "an unknown service": (request_fields(path=b"/test.Other/Call"), "200", 12),
    "an unknown method": (request_fields(path=b"/test.Test/Other"), "200", 12),
    "a timeout without a unit": (request_fields(extra=[(b"grpc-timeout", b"10")]), "400", 13),
    "a timeout of nine digits": (request_fields(extra=[(b"grpc-timeout", b"123456789S")]), "400", 13),
    "a negative timeout": (request_fields(extra=[(b"grpc-timeout", b"-1S")]), "400", 13),
    "two timeouts": (request_fields(extra=[(b"grpc-timeout", b"1S"), (b"grpc-timeout", b"2S")]), "400", 13),
    "a bad timeout and an unknown method": (
        request_fields(path=b"/test.Test/Other", extra=[(b"grpc-timeout", b"x")]),
        "400",
        13,
    ),
    "an unknown encoding": (request_fields(extra=[(b"grpc-encoding", b"snappy")]), "200", 12),
    "metadata that is no base64": (request_fields(extra=[(b"x-bin", b"###")]), "400", 13),
    "metadata of an impossible length": (request_fields(extra=[(b"x-bin", b"AAAAA")]), "400", 13),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
async def test_wrong_headers_are_refused_and_the_connection_goes_on(name: str) -> None:
    fields, http_status, grpc_status = WRONG_HEADERS[name]
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        response = await answer(client, fields)
        assert len(response.headers) == 1
        assert response.headers[0][":status"] == http_status
        assert response.status == grpc_status
        assert response.message
        assert (await client.call(b"x")).messages == [b"echo x"]


async def test_refusals_while_the_body_still_comes_do_not_disturb_the_connection() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        stream_id = await client.open(path=b"/no.Such/Method", end=False)
        assert (await client.response(stream_id)).status == 12
        await client.send(wire.data(stream_id, framed(b"late"), wire.END_STREAM))
        assert (await client.call(b"x")).messages == [b"echo x"]


async def test_a_refused_encoding_says_which_are_taken() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        response = await answer(client, request_fields(extra=[(b"grpc-encoding", b"br")]))
        assert response.trailers["grpc-accept-encoding"] == "identity,gzip"


@pytest.mark.parametrize("content_type", [b"application/grpc+proto", b"application/grpc;charset=utf-8", b"Application/gRPC"])
async def test_content_types_that_mean_protobuf_are_served(content_type: bytes) -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        fields = request_fields(without=[b"content-type"], extra=[(b"content-type", content_type)])
        assert (await answer(client, fields, framed(b"x"))).messages == [b"echo x"]


WRONG_BODIES = {
    "no message": (b"", 12),
    "two messages": (framed(b"a") + framed(b"b"), 12),
    "a message that does not parse": (b"\0\0\0\0\4\x0a\xff\xff\xff", 13),
    "a message cut in its prefix": (b"\0\0\0", 13),
    "a message cut in its body": (framed(b"abc")[:-1], 13),
    "a compressed flag of 2": (b"\2" + framed()[1:], 13),
    "a compressed flag without an encoding": (b"\1" + framed()[1:], 13),
    "a message over the limit": (b"\0" + (100_001).to_bytes(4, "big"), 8),
    "a message of 4 GB": (b"\0\xff\xff\xff\xff", 8),
    "something else entirely": (b"GET / HTTP/1.1\r\n\r\n", 13),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
@pytest.mark.parametrize("cardinality", ["unary", "server stream"])
async def test_wrong_bodies_end_the_call_and_the_connection_goes_on(name: str, cardinality: str) -> None:
    body, status = WRONG_BODIES[name]
    wrong = service(never, SERVER_STREAM if cardinality == "server stream" else UNARY)
    async with serving(wrong, service(echo, name="test.Echo"), limits=LIMITS) as serve:
        client = await serve.connect()
        response = await answer(client, request_fields(), body)
        assert response.status == status
        assert (await client.call(b"x", path=b"/test.Echo/Call")).messages == [b"echo x"]


async def test_a_broken_message_ends_a_streaming_request_where_it_stands() -> None:
    got = []

    async def read(messages: rpc.Call) -> BytesValue:
        async for message in messages:
            got.append(message.value)
        raise AssertionError

    async with serving(service(read, CLIENT_STREAM), limits=LIMITS) as serve:
        client = await serve.connect()
        response = await answer(client, request_fields(), framed(b"good") + b"\7bad")
        assert response.status == 13
    assert got == [b"good"]


async def test_a_message_over_the_limit_is_refused_at_its_prefix() -> None:
    async with serving(service(echo), limits=LIMITS) as serve:
        client = await serve.connect()
        stream_id, frames = client.request(end=False)
        await client.send(frames, wire.data(stream_id, b"\0" + (100_001).to_bytes(4, "big")))
        response = await client.response(stream_id)
        assert response.status == 8
        assert "100001" in response.message
        assert "100000" in response.message


async def test_a_message_at_the_limit_is_served() -> None:
    size = len(value(b"x" * 99_000).SerializeToString())
    async with serving(service(echo), limits=rpc.ServerLimits(max_message_size=size)) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=1_000_000)
        await client.send(wire.window_update(0, 1_000_000))
        content = b"x" * 99_000
        stream_id, frames = client.request(end=False)
        await client.send(frames)
        body = framed(content)
        for i in range(0, len(body), 10_000):
            await client.send(wire.data(stream_id, body[i : i + 10_000]))
            await trio.testing.wait_all_tasks_blocked()
        await client.send(wire.data(stream_id, b"", wire.END_STREAM))
        assert (await client.response(stream_id)).messages == [b"echo " + content]


def compressed(packed: bytes) -> bytes:
    return b"\1" + len(packed).to_bytes(4, "big") + packed


GZIP = [(b"grpc-encoding", b"gzip")]


@pytest.mark.parametrize("size", [10, 90_000])
async def test_gzip_requests_are_unpacked_small_and_large(size: int) -> None:
    content = value(b"y" * size).SerializeToString()
    async with serving(service(echo), limits=LIMITS) as serve:
        client = await serve.connect(INITIAL_WINDOW_SIZE=200_000)
        await client.send(wire.window_update(0, 200_000))
        response = await answer(client, request_fields(extra=GZIP), compressed(gzip.compress(content)))
        assert response.messages == [b"echo " + b"y" * size]


async def test_a_message_that_is_not_compressed_may_come_in_a_compressed_request() -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        assert (await answer(client, request_fields(extra=GZIP), framed(b"x"))).messages == [b"echo x"]


WRONG_GZIP = {
    "not gzip": (b"hello", 13),
    "zlib without gzip's header": (zlib.compress(b"hello"), 13),
    "cut short": (gzip.compress(value(b"x" * 1000).SerializeToString())[:-6], 13),
    "a second member": (gzip.compress(b"") + gzip.compress(b""), 13),
    "over the limit when unpacked": (gzip.compress(bytes(100_001)), 8),
    "a bomb": (gzip.compress(bytes(10_000_000)), 8),
    "a broken checksum": (gzip.compress(bytes(90_000))[:-8] + b"\0" * 8, 13),
}


@pytest.mark.parametrize("name", WRONG_GZIP)
async def test_wrong_gzip_ends_the_call_with_its_status(name: str) -> None:
    packed, status = WRONG_GZIP[name]
    async with serving(service(never), limits=LIMITS) as serve:
        client = await serve.connect()
        assert (await answer(client, request_fields(extra=GZIP), compressed(packed))).status == status


async def test_responses_are_packed_when_the_handler_asks_and_the_caller_accepts() -> None:
    accepted = []

    async def packed(message: BytesValue, request: rpc.Call) -> None:
        accepted.append(request.use_gzip())
        await request.send(value(b"z" * 10))
        await request.send(value(b"z" * 50_000))

    async with serving(service(packed, SERVER_STREAM)) as serve:
        client = await serve.connect()
        response = await answer(client, request_fields(extra=[(b"grpc-accept-encoding", b"deflate, gzip")]))
        assert response.headers[0]["grpc-encoding"] == "gzip"
        contents, body = [], bytes(response.data)
        while body:
            length = int.from_bytes(body[1:5], "big")
            assert body[0] == 1
            contents.append(BytesValue.FromString(gzip.decompress(body[5 : 5 + length])).value)
            body = body[5 + length :]
        assert contents == [b"z" * 10, b"z" * 50_000]

        response = await answer(client, request_fields())
        assert "grpc-encoding" not in response.headers[0]
        assert response.messages == [b"z" * 10, b"z" * 50_000]
    assert accepted == [True, False]


@pytest.mark.parametrize("content", [b"a\rb", b"a\nb", b"a\0b"])
async def test_control_characters_in_a_header_cost_that_stream_only(content: bytes) -> None:
    async with serving(service(echo)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"", extra=[(b"x-evil", content)])
        assert (await client.response(stream_id)).reset == wire.PROTOCOL_ERROR
        assert (await client.call(b"x")).messages == [b"echo x"]
