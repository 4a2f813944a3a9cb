"""Protects against HTTP/2 clients that are no gRPC clients: nghttp2's h2load and nghttp, and curl, against a real port."""

from __future__ import annotations

import pathlib
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trustme
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import SERVER_STREAM, framed, service, value
from trio_frontend import rpc

pytestmark = pytest.mark.process

GRPC = ["-H", "content-type: application/grpc", "-H", "te: trailers"]


async def echo(message: BytesValue) -> BytesValue:
    return value(b"echo " + message.value)


async def hundred(message: BytesValue, request: rpc.Call) -> None:
    for _ in range(100):
        await request.send(message)


@asynccontextmanager
async def serving(limits: rpc.ServerLimits | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    server = rpc.Server([service(echo), service(hundred, SERVER_STREAM, name="test.Stream")], limits=limits)
    async with trio.open_nursery() as nursery:
        [(host, port)] = await nursery.start(server.serve, await rpc.listen_tcp(tls=tls))
        yield f"{'https' if tls else 'http'}://{host}:{port}"
        await server.shutdown(1)
    assert server.running_handlers == 0


@pytest.fixture
def body(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "request.bin"
    path.write_bytes(framed(b"hello"))
    return str(path)


async def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: nghttp2-client, curl)")
    with trio.fail_after(60):
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT)
    return done.stdout.decode("latin-1")


@pytest.mark.parametrize(("path", "requests"), [("test.Test/Call", 5000), ("test.Stream/Call", 500)])
async def test_h2load_gets_every_answer(body: str, path: str, requests: int) -> None:
    async with serving() as url:
        out = await output("h2load", "-n", str(requests), "-c", "10", "-m", "20", "-d", body, *GRPC, f"{url}/{path}")
    assert f"{requests} succeeded, 0 failed, 0 errored, 0 timeout" in out
    assert f"{requests} 2xx" in out


async def test_h2load_gets_every_answer_over_tls(body: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    async with serving(tls=context) as url:
        out = await output("h2load", "-n", "1000", "-c", "5", "-m", "20", "-d", body, *GRPC, f"{url}/test.Stream/Call")
    assert "1000 succeeded, 0 failed" in out
    assert "Application protocol: h2" in out


async def test_h2load_with_the_smallest_windows_gets_every_answer(body: str) -> None:
    async with serving() as url:
        out = await output(
            "h2load", "-n", "100", "-c", "2", "-m", "5", "-w", "10", "-W", "16", "-d", body, *GRPC, f"{url}/test.Stream/Call"
        )
    assert "100 succeeded, 0 failed" in out


async def test_nghttp_with_its_priorities_and_padding_is_answered(body: str) -> None:
    async with serving() as url:
        out = await output("nghttp", "-v", "-b", "50", "-d", body, *GRPC, f"{url}/test.Test/Call")
    assert ":status: 200" in out
    assert "grpc-status: 0" in out
    assert "echo hello" in out
    assert not re.search(r"recv (RST_STREAM|GOAWAY)", out)


async def test_nghttps_oversized_headers_are_refused_and_taken_where_the_limit_allows(body: str) -> None:
    """Its --continuation sends more than 16 KB of headers."""
    command = ["nghttp", "-v", "--continuation", "-d", body, *GRPC]
    async with serving() as url:
        assert "header block too long" in await output(*command, f"{url}/test.Test/Call")
    limits = rpc.ServerLimits(http2=rpc.Http2Limits(max_header_block=65_536, max_header_list_size=65_536))
    async with serving(limits) as url:
        assert "grpc-status: 0" in await output(*command, f"{url}/test.Test/Call")


async def test_curl_is_answered_with_message_and_trailers(body: str, tmp_path: pathlib.Path) -> None:
    async with serving() as url:
        answer, headers = tmp_path / "answer.bin", tmp_path / "headers.txt"
        await output(
            "curl",
            "-sS",
            "--http2-prior-knowledge",
            *GRPC,
            "--data-binary",
            f"@{body}",
            "-o",
            str(answer),
            "-D",
            str(headers),
            f"{url}/test.Test/Call",
        )
    assert answer.read_bytes() == framed(b"echo hello")
    assert headers.read_text().startswith("HTTP/2 200")
    assert "grpc-status: 0" in headers.read_text()


async def test_curl_without_a_call_is_told_what_is_wrong() -> None:
    async with serving() as url:
        curl = ["curl", "-sS", "--http2-prior-knowledge", "-o", "/dev/null", "-D", "-"]
        assert (await output(*curl, f"{url}/test.Test/Call")).startswith("HTTP/2 405")
        assert (await output(*curl, "-X", "POST", f"{url}/test.Test/Call")).startswith("HTTP/2 415")
