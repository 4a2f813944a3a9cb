"""python -m benchmarks.micro.http2: CPU of rpc/http2/ alone, in microseconds per request parsed, call answered, and frame sent.

No sockets, no tasks: bytes go in, calls are made, output is taken. ``--profile NAME`` prints where the time of one line goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator

import hpack

from trio_frontend.rpc import http2
from trio_frontend.rpc.http2 import frames

PREFIX = b"\0\0\0\0\x28"
MESSAGE = b"x" * 40
BODY = PREFIX + MESSAGE
RESPONSE = http2.encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
TRAILERS = http2.encode_headers([(b"grpc-status", b"0")])
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/vllm.Inference/GenerateStream"),
    (b":authority", b"127.0.0.1:50051"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    (b"user-agent", b"grpc-python/1.70 grpc-c/40"),
]


class Client:
    """A connection with open windows, and the frames a client would send on it."""

    def __init__(self) -> None:
        self.connection = http2.Connection(http2.Limits(max_concurrent_streams=100_000))
        window = {frames.SETTINGS_INITIAL_WINDOW_SIZE: 2**31 - 1}
        start = frames.PREFACE + frames.settings(window) + frames.window_update(0, 2**31 - 1 - 65_535)
        self.connection.receive_data(start, 0.0)
        self.connection.take_output()
        self._encoder = hpack.Encoder()
        self._next = 1

    def request(self, extra: list[tuple[bytes, bytes, bool]]) -> tuple[int, bytes]:
        """A stream id, and HEADERS and DATA that end the request."""
        stream_id = self._next
        self._next += 2
        block = self._encoder.encode([*REQUEST, *extra])
        headers = frames.header_block(stream_id, block, False, 16_384)
        return stream_id, headers + frames.frame(frames.DATA, frames.END_STREAM, stream_id, BODY)

    def open(self) -> int:
        """A stream whose response has begun."""
        stream_id, request = self.request([])
        self.connection.receive_data(request, 0.0)
        self.connection.send_headers(stream_id, RESPONSE)
        self.connection.take_output()
        return stream_id


def answer(connection: http2.Connection, stream_id: int) -> None:
    connection.acknowledge(stream_id, len(BODY))
    connection.send_headers(stream_id, RESPONSE)
    connection.try_send_message(stream_id, PREFIX, MESSAGE)
    connection.send_headers(stream_id, TRAILERS, end_stream=True)
    connection.take_output()


def requests(count: int, extra: Callable[[int], list[tuple[bytes, bytes, bool]]], *, answered: bool) -> Iterator[None]:
    client = Client()
    client.open()
    made = [client.request(extra(i)) for i in range(count)]
    yield
    connection = client.connection
    for stream_id, request in made:
        connection.receive_data(request, 0.0)
        if answered:
            answer(connection, stream_id)


def messages(count: int, send: Callable[[http2.Connection, int], object], streams: int) -> Iterator[None]:
    client = Client()
    stream_ids = [client.open() for _ in range(streams)]
    yield
    connection = client.connection
    for _ in range(count // streams):
        for stream_id in stream_ids:
            send(connection, stream_id)
        connection.take_output()


def received(count: int, size: int, per_read: int) -> Iterator[None]:
    client = Client()
    block = http2.encode_headers([(name, value) for name, value in REQUEST if not name.startswith(b":")])
    fields = hpack.Encoder().encode(REQUEST[:4]) + block
    client.connection.receive_data(frames.header_block(1, fields, False, 16_384), 0.0)
    read = frames.frame(frames.DATA, 0, 1, b"x" * size) * per_read
    yield
    connection = client.connection
    for _ in range(count // per_read):
        connection.receive_data(read, 0.0)
        connection.acknowledge(1, size * per_read)


def updates(count: int) -> Iterator[None]:
    client = Client()
    stream_id = client.open()
    client.connection.send_data(stream_id, b"x" * 16_384)
    client.connection.take_output()
    update = frames.window_update(stream_id, 1)
    yield
    for i in range(count):
        client.connection.receive_data(update, i / 1_000)


def cut(count: int) -> Iterator[None]:
    client = Client()
    stream_id = client.open()
    del stream_id
    whole = frames.frame(0x99, 0, 0, b"x" * 16_384)
    pieces = [whole[start : start + 8] for start in range(0, len(whole), 8)]
    yield
    for i in range(count // len(pieces)):
        for piece in pieces:
            client.connection.receive_data(piece, i * 1.0)


def plain(connection: http2.Connection, stream_id: int) -> None:
    connection.send_data(stream_id, PREFIX + MESSAGE)


def fast(connection: http2.Connection, stream_id: int) -> None:
    connection.try_send_message(stream_id, PREFIX, MESSAGE)


def trace(i: int) -> list[tuple[bytes, bytes, bool]]:
    return [(b"traceparent", b"00-%032x-%016x-01" % (i, i), True), (b"grpc-timeout", b"%dm" % (10_000 + i), True)]


BENCHMARKS: dict[str, tuple[int, Callable[[int], Iterator[None]]]] = {
    "request parsed, header block seen before": (20_000, lambda n: requests(n, lambda _: [], answered=False)),
    "request parsed, header block with new values": (5_000, lambda n: requests(n, trace, answered=False)),
    "unary call, header block seen before": (20_000, lambda n: requests(n, lambda _: [], answered=True)),
    "unary call, header block with new values": (5_000, lambda n: requests(n, trace, answered=True)),
    "DATA frame sent, try_send_message, 64 streams": (200_000, lambda n: messages(n, fast, 64)),
    "DATA frame sent, send_data, 64 streams": (200_000, lambda n: messages(n, plain, 64)),
    "DATA frame of 45 bytes received, one in a read": (100_000, lambda n: received(n, 45, 1)),
    "DATA frame of 45 bytes received, 100 in a read": (100_000, lambda n: received(n, 45, 100)),
    "DATA frame of 16 KiB received, 4 in a read": (20_000, lambda n: received(n, 16_384, 4)),
    "WINDOW_UPDATE received": (10_000, updates),
    "8-byte read of an unfinished frame": (200_000, cut),
}


def measure(count: int, prepare: Callable[[int], Iterator[None]]) -> float:
    """The best of five, in microseconds."""
    best = float("inf")
    for _ in range(5):
        steps = prepare(count)
        next(steps)
        began = time.process_time()
        next(steps, None)
        best = min(best, time.process_time() - began)
    return best / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=BENCHMARKS, metavar="NAME")
    arguments = parser.parse_args()
    if arguments.profile:
        count, prepare = BENCHMARKS[arguments.profile]
        steps = prepare(count)
        next(steps)
        with cProfile.Profile() as profile:
            next(steps, None)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for name, (count, prepare) in BENCHMARKS.items():
        print(f"{measure(count, prepare):8.2f} us  {name}")


if __name__ == "__main__":
    main()
