"""Record what real clients send: `python -m tests.rpc.http2.record` rewrites recorded/*.bin.

Each file is every byte of one client connection, from the preface on, as sent to a small server on rpc/http2 that answers every
request with one message and OK. The files seed the fuzzers and are replayed by the tests. Needs grpcio, curl, nghttp and h2load.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import trio

from tests.rpc.http2.wire import ends_request
from trio_frontend.rpc import http2

RECORDED = Path(__file__).parent / "recorded"

_HEADERS = http2.encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
_TRAILERS = http2.encode_headers([(b"grpc-status", b"0")])
_MESSAGE = b"hello" * 20
_FRAMED = b"\0" + len(_MESSAGE).to_bytes(4, "big") + _MESSAGE


async def _answer(stream: trio.SocketStream, record: bytearray) -> None:
    connection = http2.Connection(http2.Limits())
    async with stream:
        await stream.send_all(connection.take_output())
        while received := await stream.receive_some(65_536):
            record += received
            for event in connection.receive_data(received, trio.current_time()):
                if isinstance(event, http2.DataReceived):
                    connection.acknowledge(event.stream_id, event.flow_controlled_length)
                if ends_request(event):
                    connection.send_headers(event.stream_id, _HEADERS)
                    connection.send_data(event.stream_id, _FRAMED)
                    connection.send_headers(event.stream_id, _TRAILERS, end_stream=True)
            await stream.send_all(connection.take_output())


async def _record(client: Callable[[int], None]) -> list[bytes]:
    """The bytes of each connection that a client made."""
    records: list[bytearray] = []

    async def handle(stream: trio.SocketStream) -> None:
        records.append(bytearray())
        with contextlib.suppress(trio.BrokenResourceError):
            await _answer(stream, records[-1])

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        port = listeners[0].socket.getsockname()[1]
        await trio.to_thread.run_sync(client, port)
        nursery.cancel_scope.cancel()
    return [bytes(record) for record in records]


def _grpc_unary(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/pkg.Service/Unary")
        for i in range(5):
            call(b"request %d" % i, timeout=5)
        call(b"x" * 20_000, metadata=[("trace", "abc"), ("key-bin", b"\0\xff" * 10)])


def _grpc_streaming(port: int) -> None:
    def requests() -> Iterator[bytes]:
        for i in range(10):
            yield b"part %d" % i

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        list(channel.stream_stream("/pkg.Service/Bidi")(requests()))
        channel.stream_unary("/pkg.Service/Upload")(requests(), compression=grpc.Compression.Gzip)
        never = channel.stream_stream("/pkg.Service/Cancelled")(iter(lambda: b"again", b""))
        never.cancel()
        channel.unary_unary("/pkg.Service/Unary")(b"last")


def _command(*arguments: str) -> Callable[[int], None]:
    def run(port: int) -> None:
        with tempfile.NamedTemporaryFile() as body:
            body.write(_FRAMED)
            body.flush()
            words = [word.format(url=f"http://127.0.0.1:{port}/pkg.Service/Method", body=body.name) for word in arguments]
            subprocess.run(words, check=True, capture_output=True, timeout=30)

    return run


CLIENTS: dict[str, Callable[[int], None]] = {
    "grpcio-unary": _grpc_unary,
    "grpcio-streaming": _grpc_streaming,
    "curl": _command("curl", "-sS", "--http2-prior-knowledge", "--data-binary", "@{body}", "-H", "te: trailers", "{url}"),
    "nghttp": _command(
        "nghttp", "--no-verify-peer", "-d", "{body}", "-H", "te: trailers", "--padding=16", "-m", "3", "{url}"
    ),
    "nghttp-trailers": _command("nghttp", "-d", "{body}", "--trailer", "checksum: 1", "-m", "2", "{url}"),
    "h2load": _command(
        "h2load",
        "-n",
        "20",
        "-c",
        "1",
        "-m",
        "4",
        "-d",
        "{body}",
        "-H",
        "content-type: application/grpc",
        "-H",
        "te: trailers",
        "{url}",
    ),
}


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for name, client in CLIENTS.items():
        [record, *_] = trio.run(_record, client)
        (RECORDED / f"{name}.bin").write_bytes(record)
        sys.stdout.write(f"{name}: {len(record)} bytes\n")


if __name__ == "__main__":
    main()
