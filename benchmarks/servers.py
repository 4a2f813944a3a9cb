"""The servers that are measured, each started the same way: ours and the peers."""

from __future__ import annotations

import pathlib
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.processes import free_port, running, wait_for_port

MODEL = pathlib.Path(__file__).parent.parent / "trio_frontend/engine/embedded/model"
MOCK_ENGINE = pathlib.Path(__file__).parent / "mock_engine.py"


@dataclass(frozen=True)
class Running:
    name: str
    port: int
    pid: int


WITHOUT_MERGING = """
import sys
from trio_frontend.cli import main
from trio_frontend.engine.vllm import connection
connection.BEHIND = float("inf")
sys.exit(main())
"""


@contextmanager
def trio_frontend(logs: pathlib.Path, *engine_options: str, merging: bool = True) -> Iterator[Running]:
    """trio_frontend over the mock engine, as its users start it.

    Without ``merging`` it never takes several steps of an engine as one, however far it is behind: each token has its frame.
    """
    port, handshake, log = free_port(), f"tcp://127.0.0.1:{free_port()}", logs / "trio_frontend.log"
    command = [sys.executable, *(("-m", "trio_frontend") if merging else ("-c", WITHOUT_MERGING))]
    command += ["serve", str(MODEL), "--port", str(port), "--handshake-address", handshake, "--log-level", "warning"]
    engine = [sys.executable, str(MOCK_ENGINE), "--handshake", handshake, *engine_options]
    with running(command, log=log) as process, running(engine, log=logs / "engine.log"):
        wait_for_port(port, process, log)
        wait_until_serving(port)
        yield Running("trio_frontend", port, process.pid)


@contextmanager
def rust_frontend(logs: pathlib.Path, *engine_options: str) -> Iterator[Running]:
    """vLLM's Rust frontend over the same mock engine."""
    port, log = free_port(), logs / "rust.log"
    command = [sys.executable, "-m", "benchmarks.peers.rust_frontend", str(port), str(MODEL), *engine_options]
    with running(command, log=log) as process:
        wait_for_port(port, process, log)
        wait_until_serving(port)
        pid = re.search(r"frontend (\d+)", log.read_text())
        assert pid, "rust_frontend prints its pid before it listens"
        yield Running("vLLM's Rust frontend", port, int(pid[1]))


@contextmanager
def constant_answers(logs: pathlib.Path, module: str, name: str) -> Iterator[Running]:
    """A peer that has no engine behind it."""
    port, log = free_port(), logs / f"{module}.log"
    with running([sys.executable, "-m", f"benchmarks.peers.{module}", str(port)], log=log) as process:
        wait_for_port(port, process, log)
        yield Running(name, port, process.pid)


def wait_until_serving(port: int, timeout: float = 60) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    end = time.monotonic() + timeout
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.05)
    raise SystemExit(f"the server on port {port} was not SERVING after {timeout} s")
