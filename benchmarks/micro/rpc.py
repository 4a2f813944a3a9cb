"""python -m benchmarks.micro.rpc: CPU of rpc/ alone, with constant messages and h2load as the client.

Per unary call; per message that a handler's own task sends; per message that another task (an engine's reader) puts into many calls in
one go with ``try_send_bytes``. No engine, no tokenizer: what is left is HTTP/2, dispatch, tasks and writes. ``--profile`` prints
where the server's time goes.
"""

from __future__ import annotations

import argparse
import pathlib
import pstats
import re
import subprocess
import sys
import tempfile

import purerpc
import trio
from google.protobuf import wrappers_pb2
from purerpc import Cardinality, RPCSignature

from benchmarks.processes import cpu_seconds, free_port, running, wait_for_port
from trio_frontend import rpc

MESSAGES = 128
ANSWER = wrappers_pb2.StringValue(value="x" * 30)
SERIALIZED = ANSWER.SerializeToString()
REQUEST = wrappers_pb2.StringValue(value="import os\n")


class Broadcast:
    """Stands for an engine: each step is one message for every call that is in it, until each has had MESSAGES."""

    def __init__(self) -> None:
        self.calls: dict[rpc.Call, int] = {}
        self.done: dict[rpc.Call, trio.Event] = {}

    async def run(self) -> None:
        while True:
            for call, left in list(self.calls.items()):
                if call.try_send_bytes(SERIALIZED):
                    if left == 1:
                        del self.calls[call]
                        self.done.pop(call).set()
                    else:
                        self.calls[call] = left - 1
            await trio.lowlevel.checkpoint()
            if not self.calls:
                await trio.sleep(0.001)

    async def wait(self, call: rpc.Call) -> None:
        self.calls[call] = MESSAGES
        self.done[call] = done = trio.Event()
        await done.wait()


def service(broadcast: Broadcast) -> purerpc.Service:
    async def unary(message: wrappers_pb2.StringValue) -> wrappers_pb2.StringValue:
        return ANSWER

    async def send(message: wrappers_pb2.StringValue, request: rpc.Call) -> None:
        for _ in range(MESSAGES):
            await request.send(ANSWER)

    async def push(message: wrappers_pb2.StringValue, request: rpc.Call) -> None:
        await broadcast.wait(request)

    bench = purerpc.Service("bench.Bench")
    for handler, cardinality in (
        (unary, Cardinality.UNARY_UNARY),
        (send, Cardinality.UNARY_STREAM),
        (push, Cardinality.UNARY_STREAM),
    ):
        signature = RPCSignature(cardinality, wrappers_pb2.StringValue, wrappers_pb2.StringValue)
        bench.add_method(handler.__name__, handler, signature)
    return bench


async def serve(port: int) -> None:
    broadcast = Broadcast()
    with trio.open_signal_receiver(15) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broadcast.run)
            await nursery.start(rpc.serve, [service(broadcast)], await rpc.listen_tcp(port))
            async for _ in signals:
                nursery.cancel_scope.cancel()


def load(port: int, method: str, requests: int, concurrency: int) -> None:
    with tempfile.NamedTemporaryFile() as body:
        serialized = REQUEST.SerializeToString()
        body.write(b"\0" + len(serialized).to_bytes(4, "big") + serialized)
        body.flush()
        command = ["h2load", "-n", str(requests), "-c", "4", "-m", str(concurrency // 4), "-d", body.name]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        command += [f"http://127.0.0.1:{port}/bench.Bench/{method}"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    succeeded = re.search(r"(\d+) succeeded", out)
    if not succeeded or int(succeeded[1]) != requests:
        raise SystemExit(f"{method}: not all of {requests} requests succeeded:\n{out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="serve on this port until SIGTERM, and measure nothing")
    parser.add_argument("--profile", choices=["unary", "send", "push"], help="profile the server under one workload")
    parser.add_argument("--requests", type=int, default=8000, help="unary calls; streams are an eighth of that")
    parser.add_argument("--concurrency", type=int, default=64)
    args = parser.parse_args()
    if args.port:
        trio.run(serve, args.port)
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory) / "server.log"
        stats = pathlib.Path(directory) / "profile"
        profiler = ["-m", "cProfile", "-o", str(stats)] if args.profile else []
        with running([sys.executable, *profiler, "-m", "benchmarks.micro.rpc", "--port", str(port)], log=log) as server:
            wait_for_port(port, server, log)
            for method, requests, per_request in (
                ("unary", args.requests, 1),
                ("send", args.requests // 8, MESSAGES),
                ("push", args.requests // 8, MESSAGES),
            ):
                if args.profile and method != args.profile:
                    continue
                load(port, method, requests // 8, args.concurrency)  # warm up
                before = cpu_seconds(server.pid)
                load(port, method, requests, args.concurrency)
                spent = cpu_seconds(server.pid) - before
                print(
                    f"{method}: {spent / requests / per_request * 1e6:.2f} us of CPU per {'call' if per_request == 1 else 'message'}"
                )
        if args.profile:
            pstats.Stats(str(stats)).sort_stats("tottime").print_stats(45)
        print(log.read_text(), end="", file=sys.stderr)


if __name__ == "__main__":
    main()
