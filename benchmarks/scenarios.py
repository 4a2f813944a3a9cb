"""What is measured, one function a question; each returns rows for the table."""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from benchmarks.load import Workload, measure
from benchmarks.processes import cpu_seconds, free_port, resident_bytes, running, wait_for_port
from benchmarks.raw_client import Connection, generate_request, pump, tokens_in
from benchmarks.servers import Running, trio_frontend, wait_until_serving

STREAM = "/vllm.Inference/GenerateStream"
KIB = 1024
Start = Callable[..., AbstractContextManager[Running]]
"""Starts a server over the mock engine: a directory for logs, then the engine's options."""


def cost_workloads(scale: float) -> list[Workload]:
    n = max(64, int(1000 * scale))
    return [
        Workload("streamed token", "GenerateStream", 128, n),
        Workload("unary 1-token request", "Generate", 1, 4 * n, per="request"),
        Workload("unary 128-token request, per token", "Generate", 128, n),
    ]


ROUNDS = 3
"""Each cost is the median of so many runs: machines are shared, and clock ticks are 10 ms."""


def costs(server: Running, scale: float) -> dict[str, float]:
    """Microseconds of CPU per unit of each workload."""
    measure(Workload("warm-up", "Generate", 1, 500), server.port, [server.pid])
    return {w.name: _cost(w, server) for w in cost_workloads(scale)}


def _cost(workload: Workload, server: Running) -> float:
    runs = [measure(workload, server.port, [server.pid]).cpu_microseconds_per_unit for _ in range(ROUNDS)]
    return statistics.median(runs)


def tokens_per_frame(server: Running) -> float:
    """Of 64 streams of 128 tokens, all at once."""
    tokens, frames = 0, 0

    def on_data(_stream: int, payload: bytes, _now: float) -> None:
        nonlocal tokens, frames
        n = tokens_in(payload)
        tokens += n
        frames += n > 0

    connections = [Connection(server.port, on_data) for _ in range(4)]
    for c in connections:
        for _ in range(16):
            c.open(STREAM, generate_request(128))
    pump(connections, lambda: sum(c.ended for c in connections) >= 64, 60)
    for c in connections:
        c.close()
    return tokens / frames


def growth(start: Start, logs: pathlib.Path, scale: float) -> dict[int, float]:
    """Microseconds of CPU per streamed token at 8, 64, 512 and 2,000 live streams, which share 8 connections, of a server that
    ``start`` starts."""
    found = {}
    with start(logs, "--max-running", "4096") as server:
        measure(Workload("warm-up", "Generate", 1, 500), server.port, [server.pid])
        for live in (8, 64, 512, 2000):
            requests = max(live, int(500 * scale) // live * live)
            w = Workload(f"{live} live", "GenerateStream", 128, requests, concurrency=live, connections=8)
            found[live] = _cost(w, server)
    return found


def idle_memory(logs: pathlib.Path) -> tuple[float, float]:
    """KiB per idle live stream (2,000 of them), and MB for 10,000 idle health watches."""
    with trio_frontend(logs, "--step-ms", "3600000", "--max-running", "4096") as server:
        per_stream = _growth_of(server, STREAM, generate_request(128), 2000) / 2000 / KIB
    with trio_frontend(logs) as server:
        watches = _growth_of(server, "/grpc.health.v1.Health/Watch", b"\0\0\0\0\0", 10_000) / 1e6
    return per_stream, watches


def _growth_of(server: Running, path: str, body: bytes, streams: int) -> float:
    """Bytes of resident memory that ``streams`` open streams add, each having brought its first message."""
    first: set[tuple[int, int]] = set()
    connections: list[Connection] = []
    for number in range(streams // 100):
        connections.append(Connection(server.port, lambda s, _p, _t, n=number: first.add((n, s))))  # type: ignore[misc]
    pump(connections[:1], lambda: True, 5)
    time.sleep(0.5)
    before = resident_bytes(server.pid)
    for c in connections:
        for _ in range(100):
            c.open(path, body)
    pump(connections, lambda: len(first) >= streams, 120)
    after = resident_bytes(server.pid)
    for c in connections:
        c.close()
    return after - before


def step_latency(start: Start, logs: pathlib.Path, seconds: float, long_prompts: bool) -> dict[str, float]:
    """With an engine that steps every 20 ms for 256 streams: milliseconds from a step to the last of its frames on the wire.

    ``long_prompts``: meanwhile a client sends a prompt of 30,000 tokens as text once a second.
    """
    steps = int(seconds * 50)
    with tempfile.NamedTemporaryFile("r") as step_log:
        options = ("--step-ms", "20", "--step-log", step_log.name, "--max-model-len", "40000")
        with start(logs, *options) as server:
            arrivals: list[tuple[float, int]] = []

            def on_data(_stream: int, payload: bytes, now: float) -> None:
                arrivals.append((now, tokens_in(payload)))

            connections = [Connection(server.port, on_data) for _ in range(4)]
            for c in connections:
                for _ in range(64):
                    c.open(STREAM, generate_request(steps))
            loaders = []
            if long_prompts:
                loader = Connection(server.port)
                loaders = [loader]
                _every_second(
                    loader, "/vllm.Inference/Generate", generate_request(1, LONG_PROMPT), connections, seconds, steps
                )
            pump([*connections, *loaders], lambda: sum(c.ended for c in connections) >= 256, seconds + 60)
            for c in connections + loaders:
                c.close()
        marks = [(float(t), int(n)) for t, n in (line.split() for line in step_log)]
    return _percentiles(_latencies(marks, arrivals))


LONG_PROMPT = b"the cat sat on the mat and " * 4286
"""About 30,000 tokens for the shipped model's tokenizer, whose words are mostly one token each."""


def _every_second(loader: Connection, path: str, body: bytes, others: list[Connection], seconds: float, steps: int) -> None:
    end = time.monotonic() + min(seconds, steps / 50) - 1
    while time.monotonic() < end:
        loader.open(path, body)
        due = time.monotonic() + 1
        pump([loader, *others], lambda due=due: time.monotonic() >= due, 30)  # type: ignore[misc]


def _latencies(marks: list[tuple[float, int]], arrivals: list[tuple[float, int]]) -> list[float]:
    """For each step, ms until as many tokens had arrived as had been sent up to and with that step."""
    found, arrived, position, sent = [], 0, 0, 0
    for at, count in marks:
        sent += count
        while arrived < sent and position < len(arrivals):
            arrived += arrivals[position][1]
            position += 1
        if arrived < sent:
            break
        if count == 256:
            found.append(max(0.0, (arrivals[position - 1][0] - at) * 1000))
    return found


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 10:
        raise SystemExit(f"only {len(values)} steps could be matched with their frames")
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values), "steps": len(values)}


def time_to_first_token(start: Start, logs: pathlib.Path, requests: int) -> dict[str, float]:
    """Milliseconds from a request's last byte to its first token, one request at a time, the mock engine's own part included."""
    found = []
    with start(logs) as server:
        first: list[float] = []

        def on_data(_stream: int, payload: bytes, now: float) -> None:
            if tokens_in(payload):
                first.append(now)

        c = Connection(server.port, on_data)
        for number in range(requests):
            sent = time.monotonic()
            c.open(STREAM, generate_request(1))
            pump([c], lambda n=number: len(first) > n and c.ended > n, 10)  # type: ignore[misc]
            found.append((first[number] - sent) * 1000)
        c.close()
    return _percentiles(found)


def overload(logs: pathlib.Path, streamed_us: float) -> dict[str, float]:
    """64 streams from an engine that makes tokens at half of, and at twice, the rate that one core sustains.

    Tokens per frame and CPU per token at each; nothing may be lost.
    """
    found = {}
    for name, factor in (("half", 0.5), ("twice", 2.0)):
        rate = factor * 1e6 / streamed_us
        step_ms = 64 / rate * 1000
        payloads: list[bytes] = []  # looked at afterwards: a client that is slower than the server would measure itself

        def on_data(_stream: int, payload: bytes, _now: float, payloads: list[bytes] = payloads) -> None:
            payloads.append(payload)

        with trio_frontend(logs, "--step-ms", f"{step_ms:.3f}", "--unbounded") as server:
            connections = [Connection(server.port, on_data) for _ in range(4)]
            before = cpu_seconds(server.pid)
            for c in connections:
                for _ in range(16):
                    c.open(STREAM, generate_request(2000))
            pump(connections, lambda cs=connections: sum(c.ended for c in cs) >= 64, 120)  # type: ignore[misc]
            spent = cpu_seconds(server.pid) - before
            for c in connections:
                c.close()
        counts = [count for count in map(tokens_in, payloads) if count]
        tokens = sum(counts)
        if tokens != 64 * 2000:
            raise SystemExit(f"at {name} the sustainable rate {64 * 2000 - tokens} of {64 * 2000} tokens were lost")
        found[f"{name}: tokens per frame"] = tokens / len(counts)
        found[f"{name}: us per token"] = spent / tokens * 1e6
    return found


def start_up() -> dict[str, float]:
    """Seconds, the best of five: ``trio-frontend --help``, ``import trio_frontend``, and from start to SERVING."""
    return {
        "trio-frontend --help": _best([sys.executable, "-m", "trio_frontend", "--help"]),
        "import trio_frontend": _best([sys.executable, "-c", "import trio_frontend"]),
        "start to SERVING, shipped model": min(_until_serving() for _ in range(3)),
    }


def _best(command: list[str]) -> float:
    return min(_timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(5))


def _timed(run: Callable[[], object]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start


def _until_serving() -> float:
    port = free_port()
    with tempfile.TemporaryDirectory() as logs:
        log = pathlib.Path(logs) / "log"
        start = time.monotonic()
        with running([sys.executable, "-m", "trio_frontend", "serve", "--port", str(port)], log=log) as process:
            wait_for_port(port, process, log)
            wait_until_serving(port)
            return time.monotonic() - start


__all__ = [
    "cost_workloads",
    "costs",
    "growth",
    "idle_memory",
    "overload",
    "start_up",
    "step_latency",
    "time_to_first_token",
    "tokens_per_frame",
]
