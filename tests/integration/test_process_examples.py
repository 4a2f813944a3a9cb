"""Protects the examples: each runs as it is written, and does what it says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.integration.command import MODEL, health, request, stream, wait_until
from trio_frontend.engine.vllm.process import group_members
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckResponse

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def program(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_nursery_example_serves_and_ends() -> None:
    with program("examples/serve_in_a_nursery.py") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert re.match(r"serving on 127\.0\.0\.1:\d+\n.+", out)


def test_the_web_example_serves_text_and_grpc_over_one_engine_and_ends_on_sigint() -> None:
    web, grpc_port = free_port(), free_port()
    command = f"import trio; from examples.beside_a_web_app import main; trio.run(main, {web}, {grpc_port})"
    with program("-c", command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"gRPC on 127.0.0.1:{grpc_port}, web on http://127.0.0.1:{web}\n"
        url = f"http://127.0.0.1:{web}/generate?prompt=Once+upon+a+time"
        text = wait_until(lambda: _fetched(url), "the web app")
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            # Greedy, and the same forty tokens both ways.
            assert text == "".join(response.outputs.text for response in stream(channel, request(40)))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "rror" not in err


def _fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read().decode()
    except ConnectionRefusedError:
        return None
    except urllib.error.URLError:
        return None


def test_the_supervisor_example_restarts_the_engine_and_keeps_serving() -> None:
    handshake = f"tcp://127.0.0.1:{free_port()}"
    engine = [sys.executable, "benchmarks/mock_engine.py", "--handshake", handshake, "--step-ms", "5"]
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 50051)) == 0:
            pytest.skip("something listens on the example's port, 50051")
    with program("examples/supervisor.py", MODEL, handshake, "--", *engine) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving on 127.0.0.1:50051\n"
        with grpc.insecure_channel("127.0.0.1:50051") as channel:
            for _ in range(2):
                assert len(list(stream(channel, request(5)))) > 1
                begun = time.monotonic()
                _kill_child(process.pid)
                wait_until(lambda: health(channel) == HealthCheckResponse.NOT_SERVING, "NOT_SERVING")
                assert time.monotonic() - begun < 5
                assert health(channel, "liveness") == HealthCheckResponse.SERVING
                wait_until(lambda: health(channel) == HealthCheckResponse.SERVING, "SERVING again")
            assert len(list(stream(channel, request(5)))) > 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def _kill_child(parent: int) -> None:
    (child,) = set(group_members(parent)) - {parent}
    os.kill(child, signal.SIGKILL)
