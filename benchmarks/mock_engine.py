"""A stand-in for a vLLM engine core: its ZeroMQ and MessagePack protocol, no model. The load of benchmarks and of tests.

A request gets max_tokens tokens, one with each step, from a fixed cycle of ids; all running requests share a step and a message, as
with a real scheduler. What it costs a frontend to serve that is then the frontend's own.

    python benchmarks/mock_engine.py --handshake tcp://127.0.0.1:5570            joins as ``vllm serve --headless`` does
    python benchmarks/mock_engine.py --input ADDRESS --output ADDRESS            joins sockets that a launcher has bound

Needs pyzmq and msgspec only, and nothing of trio_frontend: it must not share a mistake with what it is used to test.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

LENGTH, ABORT, ERROR = 1, 2, 3
ADD_REQUEST, ABORT_REQUESTS, UTILITY_CALL = b"\x00", b"\x01", b"\x03"

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handshake", metavar="ADDRESS", help="say HELLO there")
    parser.add_argument("--input", metavar="ADDRESS", action="append", default=[], help="a frontend's input socket")
    parser.add_argument("--output", metavar="ADDRESS", action="append", default=[], help="a frontend's output socket")
    parser.add_argument("--rank", type=int, default=0, help="data-parallel rank (default 0)")
    parser.add_argument("--dp-size", type=int, default=1, help="data_parallel_size in the ready response")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=1024, help="requests in one step; more wait (default 1024)")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="time between steps; 0: as fast as the frontend takes them"
    )
    parser.add_argument("--tokens", default=",".join(map(str, range(300, 310))), help="the cycle of token ids")
    parser.add_argument("--stats", action="store_true", help="send scheduler statistics with each step")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds of model loading before the ready response")
    parser.add_argument(
        "--unbounded", action="store_true", help="never wait for a slow frontend: keep what it does not take"
    )
    parser.add_argument("--step-log", metavar="FILE", help="a line for each step with requests: monotonic time, tokens sent")
    parser.add_argument("--die-after", metavar="N", type=int, default=0, help="exit without a word after N steps")
    parser.add_argument("--error-after", metavar="N", type=int, default=0, help="end what runs with ERROR after N steps")
    parser.add_argument("--stall-after", metavar="N", type=int, default=0, help="step no more after N steps")
    parser.add_argument("--verbose", action="store_true", help="print every message to stderr")
    options = parser.parse_args()
    if not options.handshake and not (options.input and options.output):
        parser.error("give --handshake, or --input and --output")
    return options


class Request:
    __slots__ = ("client", "left", "tokens")

    def __init__(self, left: int, client: int, tokens: Iterator[int]) -> None:
        self.left = left
        self.client = client
        self.tokens = tokens


class MockEngine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokens = [int(token) for token in options.tokens.split(",")]
        self.context = zmq.Context()
        self.identity = options.rank.to_bytes(2, "little")
        self.running: dict[str, Request] = {}
        self.waiting: deque[tuple[str, Request]] = deque()
        self.inputs: list[zmq.Socket[bytes]] = []
        self.outputs: list[zmq.Socket[bytes]] = []
        self.poller = zmq.Poller()
        self.steps = 0
        self.paused = False
        self.log = open(options.step_log, "w", buffering=1) if options.step_log else None  # noqa: SIM115

    def join(self) -> None:
        inputs, outputs = self.options.input, self.options.output
        handshake = None
        if self.options.handshake:
            handshake = self._socket(zmq.DEALER, self.options.handshake, linger=5000)
            handshake.send(encode({"status": "HELLO", "local": True, "headless": True}))
            addresses = decode(handshake.recv())["addresses"]
            inputs, outputs = addresses["inputs"], addresses["outputs"]
        time.sleep(self.options.load_s)
        for address in inputs:
            socket = self._socket(zmq.DEALER, address)
            socket.send(encode(self._ready_response()))
            self.poller.register(socket, zmq.POLLIN)
            self.inputs.append(socket)
        self.outputs = [self._socket(zmq.PUSH, address) for address in outputs]
        if handshake is not None:
            handshake.send(encode({"status": "READY", "local": True, "headless": True, "parallel_config_hash": None}))
            handshake.close()
        print("mock engine ready", flush=True)

    def _socket(self, kind: int, address: str, linger: int = 0) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, linger)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self.identity)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        else:
            # A slow frontend slows the engine down, as long as one is not asked for that does not care.
            socket.setsockopt(zmq.SNDHWM, 0 if self.options.unbounded else 64)
        socket.connect(address)
        return socket

    def _ready_response(self) -> dict[str, Any]:
        return {
            "max_model_len": self.options.max_model_len,
            "num_gpu_blocks": 4096,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "float32",
            "vllm_version": "0.33.0",
            "world_size": 1,
            "data_parallel_size": self.options.dp_size,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": self.options.rank,
            "max_num_seqs": self.options.max_running,
            "max_num_batched_tokens": 8192,
            "instance_id": "mock",
            "supports_lora": False,
            "max_loras": 0,
            "mamba_block_size": None,
            "kv_cache_size_tokens": 65536,
            "kv_cache_max_concurrency": 64.0,
            "kv_events_config": None,
            "weight_transfer_backend": None,
            "enable_sleep_mode": False,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": 16,
        }

    def serve(self) -> None:
        due = 0.0
        while True:
            self._receive(due if self.running and not self._stalled else None)
            if not self.running or self._stalled or time.monotonic() < due:
                continue
            due = time.monotonic() + self.options.step_ms / 1000
            self._step()

    @property
    def _stalled(self) -> bool:
        return self.paused or 0 < self.options.stall_after <= self.steps

    def _receive(self, until: float | None) -> None:
        wait = 1000.0 if until is None else max(0.0, until - time.monotonic()) * 1000
        for socket, _ in self.poller.poll(wait):
            while True:
                try:
                    kind, body, *_ = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._handle(kind, decode(body))

    def _handle(self, kind: bytes, body: Any) -> None:
        if self.options.verbose:
            print(kind, body, file=sys.stderr, flush=True)
        if kind == ADD_REQUEST:
            client = body[11] if len(body) > 11 else 0
            request = Request(body[3].get("max_tokens", 16), client, itertools.cycle(self.tokens))
            if len(self.running) < self.options.max_running:
                self.running[body[0]] = request
            else:
                self.waiting.append((body[0], request))
        elif kind == ABORT_REQUESTS:
            gone = set(body)
            for request_id in body:
                self.running.pop(request_id, None)
            if self.waiting:
                self.waiting = deque(item for item in self.waiting if item[0] not in gone)
            self._admit()
        elif kind == UTILITY_CALL:
            client, call_id, method, args = body
            self._send(client, [], [call_id, *self._utility(method, args)])

    def _utility(self, method: str, args: list[Any]) -> list[Any]:
        """The failure message and the result of a utility call."""
        if method == "pause_scheduler":
            self.paused = True
        elif method == "resume_scheduler":
            self.paused = False
        results = {
            "pause_scheduler": None,
            "resume_scheduler": None,
            "is_scheduler_paused": self.paused,
            "is_sleeping": False,
            "list_loras": [],
            "get_weight_version": "default",
            "echo": args,
        }
        if method not in results:
            return [f"Call to {method} method failed: 'MockEngine' object has no attribute '{method}'", None]
        return [None, [None, results[method]]]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_running:
            request_id, request = self.waiting.popleft()
            self.running[request_id] = request

    def _step(self) -> None:
        self.steps += 1
        if 0 < self.options.die_after <= self.steps:
            os._exit(1)
        fail = 0 < self.options.error_after <= self.steps
        batches: dict[int, list[list[Any]]] = {}
        done = []
        for request_id, request in self.running.items():
            request.left -= 1
            if fail:
                output = [request_id, [], None, None, None, ERROR]
            elif request.left <= 0:
                output = [request_id, [next(request.tokens)], None, None, None, LENGTH]
            else:
                output = [request_id, [next(request.tokens)]]
            if len(output) > 2:
                done.append(request_id)
            batches.setdefault(request.client, []).append(output)
        for request_id in done:
            del self.running[request_id]
        if fail:
            self.steps = 0
        self._admit()
        if self.log is not None:
            self.log.write(f"{time.monotonic():.6f} {sum(map(len, batches.values()))}\n")
        for client, outputs in batches.items():
            self._send(client, outputs, None)

    def _send(self, client: int, outputs: list[list[Any]], utility: list[Any] | None) -> None:
        stats = (
            {"num_running_reqs": len(self.running), "num_waiting_reqs": len(self.waiting)} if self.options.stats else None
        )
        self.outputs[client].send(encode([self.options.rank, outputs, stats, time.monotonic(), utility]))


if __name__ == "__main__":
    engine = MockEngine(arguments())
    engine.join()
    try:
        engine.serve()
    except KeyboardInterrupt:
        sys.exit(130)
