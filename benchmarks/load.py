"""h2load as the client of a workload, and what the server's processes spent on it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.processes import cpu_seconds
from benchmarks.raw_client import generate_request

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Workload:
    """``requests`` in all, ``concurrency`` at a time over ``connections``; ``per`` says what one unit of work is."""

    name: str
    method: str
    tokens: int
    requests: int
    concurrency: int = 64
    connections: int = 4
    per: str = "token"

    @property
    def units(self) -> int:
        return self.requests * (self.tokens if self.per == "token" else 1)


@dataclass(frozen=True)
class Cost:
    cpu_microseconds_per_unit: float
    units_per_second: float


def measure(workload: Workload, port: int, pids: Sequence[int]) -> Cost:
    """Run ``workload`` against 127.0.0.1:port; CPU is that of ``pids`` together. SystemExit if a request fails."""
    with tempfile.NamedTemporaryFile() as request:
        request.write(generate_request(workload.tokens))
        request.flush()
        command = ["h2load", "-n", str(workload.requests), "-c", str(workload.connections)]
        command += ["-m", str(workload.concurrency // workload.connections), "-d", request.name]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        command += [f"http://127.0.0.1:{port}/vllm.Inference/{workload.method}"]
        before = sum(map(cpu_seconds, pids))
        out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
        spent = sum(map(cpu_seconds, pids)) - before
    succeeded = re.search(r"(\d+) succeeded", out)
    finished = re.search(r"finished in ([\d.]+)(us|ms|s)", out)
    if not succeeded or not finished or int(succeeded[1]) != workload.requests:
        raise SystemExit(f"{workload.name}: not all of {workload.requests} requests succeeded:\n{out}")
    wall = float(finished[1]) * UNITS[finished[2]]
    return Cost(spent / workload.units * 1e6, workload.units / wall)
