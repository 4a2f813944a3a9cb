"""Protects life beside Hypercorn: one nursery, one engine, a web app over HTTP/1.1 and HTTP/2, and each ends without the other's harm."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve as serve_web

from examples.beside_a_web_app import web_app
from tests.lifecycle.calls import SERVING, check
from trio_frontend.engine.base import FinishReason
from trio_frontend.testing import open_frontend

H = 39


@pytest.fixture
async def beside(engine, config) -> AsyncIterator[tuple[str, object]]:
    """The web app's address and the server's channel."""
    web_config = Config()
    web_config.bind = ["127.0.0.1:0"]
    done = trio.Event()
    async with open_frontend(engine, config()) as frontend, frontend.connect() as channel, trio.open_nursery() as nursery:
        run = partial(serve_web, web_app(channel), web_config, shutdown_trigger=done.wait)
        (url,) = await nursery.start(run)
        yield url.removeprefix("http://"), channel
        done.set()


@asynccontextmanager
async def browser(address: str) -> AsyncIterator[trio.SocketStream]:
    host, port = address.split(":")
    async with await trio.open_tcp_stream(host, int(port)) as connection:
        await connection.send_all(b"GET /generate?prompt=x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield connection


async def test_a_page_streams_text_as_it_comes(beside, engine) -> None:
    address, channel = beside
    async with browser(address) as connection:
        request = await engine.next_request()
        request.send([H])
        received = b""
        while b"H" not in received.partition(b"\r\n\r\n")[2]:
            received += await connection.receive_some()
        request.send([H], finish_reason=FinishReason.LENGTH)
        await request.closed.wait()
    assert not request.aborted.is_set()
    assert await check(channel) == SERVING


async def test_a_browser_that_leaves_ends_its_request_in_the_engine(beside, engine) -> None:
    address, channel = beside
    async with browser(address) as connection:
        request = await engine.next_request()
        request.send([H])
        await connection.receive_some()
    with trio.fail_after(5):
        await request.aborted.wait()
    assert await check(channel) == SERVING


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
async def test_the_web_server_speaks_http_1_and_2_with_the_h2_that_purerpc_allows(beside, engine, nursery, version) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    address, _ = beside

    async def answer() -> None:
        request = await engine.next_request()
        for _ in range(10):
            request.send([H] * 20)
        request.send([H], finish_reason=FinishReason.LENGTH)

    nursery.start_soon(answer)
    command = ["curl", "-s", "-S", "--max-time", "20", version, f"http://{address}/generate"]
    page = await trio.run_process(command, capture_stdout=True)
    assert page.stdout == b"H" * 201
