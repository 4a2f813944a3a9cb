"""Protects the driver and the calls from what no client would send: any frames in any order never become a fault of the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rpc.harness import BIDI, Serving, framed, request_fields, service
from tests.rpc.http2 import wire
from tests.rpc.http2.wire import END_HEADERS, END_STREAM
from trio_frontend import rpc


async def echo(messages: rpc.Call, request: rpc.Call) -> None:
    async for message in messages:
        await request.send(message)


async def unary(message: object) -> object:
    return message


streams = st.integers(0, 12)
words = st.sampled_from([0, 1, 100, 65_535, 2**31 - 1, 2**32 - 1])
bodies = st.one_of(
    st.just(framed(b"hello")),
    st.just(b""),
    st.binary(max_size=40),
    st.just(b"\0\0\0\x40\0" + bytes(5)),
    st.just(bytes(5) * 50),
)
FIELDS = [
    request_fields(),
    request_fields(path=b"/test.Unary/Call"),
    request_fields(path=b"/no/Such"),
    request_fields(extra=[(b"grpc-timeout", b"1m")]),
    request_fields(extra=[(b"grpc-encoding", b"gzip")]),
    request_fields(extra=[(b"content-length", b"12")]),
    request_fields(without=[b"te"]),
    [(b"grpc-status", b"0")],
    [],
]
frames = st.one_of(
    st.builds(wire.headers, streams, st.sampled_from(FIELDS), st.sampled_from([END_HEADERS, END_HEADERS | END_STREAM, 0])),
    st.builds(wire.headers, streams, st.sampled_from(FIELDS[:2]), st.just(END_HEADERS)),
    st.builds(wire.data, streams, bodies, st.sampled_from([0, 0, END_STREAM, wire.PADDED])),
    st.builds(wire.data, streams, bodies, st.sampled_from([0, END_STREAM])),
    st.builds(wire.rst_stream, streams, words),
    st.builds(wire.window_update, streams, words),
    st.builds(wire.settings, st.lists(st.tuples(st.integers(0, 7), words), max_size=3)),
    st.just(wire.frame(wire.SETTINGS, wire.ACK)),
    st.builds(wire.ping, st.just(b"draining"), st.sampled_from([0, wire.ACK])),
    st.builds(wire.goaway, streams, words),
    st.builds(wire.frame, st.integers(0, 12), st.integers(0, 255), streams, st.binary(max_size=20)),
    st.binary(max_size=20),
)


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.ERROR, logger="trio_frontend")
    return caplog


async def send_all(pieces: list[bytes]) -> None:
    server = rpc.Server([service(echo, BIDI), service(unary, name="test.Unary")])
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        serve = Serving(server, nursery)
        wild = serve.connect_silently()
        nursery.start_soon(wild.stream.receive_some, 2**20)
        for piece in pieces:
            try:
                await wild.stream.send_all(piece)
            except trio.BrokenResourceError:
                break
            await trio.testing.wait_all_tasks_blocked()
        other = await serve.connect()
        assert (await other.call(b"x", path=b"/test.Unary/Call")).messages == [b"x"]
        await trio.sleep(0.01)
        await other.aclose()
        nursery.cancel_scope.cancel()
    assert server.live_connections == server.running_handlers == 0


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, max_size=25), st.booleans())
def test_any_frames_in_any_order_are_no_fault_of_the_server(
    faults: pytest.LogCaptureFixture, sent: list[bytes], together: bool
) -> None:
    hello = wire.PREFACE + wire.settings()
    pieces = [hello + b"".join(sent)] if together else [hello, *sent]
    trio.run(send_all, pieces, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not faults.records


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, max_size=60), st.booleans())
def test_ten_thousand_times_any_frames_in_any_order_are_no_fault_of_the_server(
    faults: pytest.LogCaptureFixture, sent: list[bytes], together: bool
) -> None:
    hello = wire.PREFACE + wire.settings()
    pieces = [hello + b"".join(sent)] if together else [hello, *sent]
    trio.run(send_all, pieces, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not faults.records
