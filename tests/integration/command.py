"""The real command line as a process, and grpcio as its client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from trio_frontend.engine.embedded import SHIPPED_MODEL
from trio_frontend.engine.vllm.process import group_members
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, GenerateResponse, StoppingCriteria

__all__ = ["FAKE_VLLM", "MODEL", "PATIENCE", "Frontend", "health", "request", "stream", "wait_until"]

MODEL = str(SHIPPED_MODEL)
FAKE_VLLM = str(Path(__file__).parents[1] / "engine" / "vllm" / "fake_vllm.py")
PATIENCE = 30.0
"""Seconds after which a test has failed rather than waits. Machines are shared; nothing here takes a tenth of it."""


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition()``; AssertionError naming ``what`` if there is none in time."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.02)
    return value


class Frontend:
    """``trio-frontend serve ARGUMENTS``, in a process group and a temporary directory of its own."""

    def __init__(self, directory: Path, *arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> None:
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self._log = directory / "stderr"
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trio_frontend", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(self.temporary), **environment},
                start_new_session=True,
                text=True,
            )

    @property
    def log(self) -> str:
        """What it wrote on stderr so far."""
        return self._log.read_text()

    def wait_serving(self) -> str:
        """Its first lines; returns the address that they name."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Serving "), f"{line!r}\n{self.log}"
        return line.split(" on ")[1].strip()

    def wait_log(self, pattern: str) -> re.Match[str]:
        return wait_until(lambda: re.search(pattern, self.log), f"{pattern!r} in the log")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_ended(self) -> int:
        """Its exit code. Nothing of it is left: no process of its group or its engine's, and no file."""
        code = self.process.wait(PATIENCE)
        assert group_members(self.process.pid) == []
        for found in re.findall(r"engine_pid=(\d+)", self.log):
            assert group_members(int(found)) == []
        # onnxruntime writes a file of its own when it is imported.
        assert [path.name for path in self.temporary.iterdir() if path.name != ".ses"] == []
        assert "Traceback" not in self.log
        return code

    def __enter__(self) -> Frontend:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for found in re.findall(r"engine_pid=(\d+)", self.log):
            if group_members(int(found)):
                os.killpg(int(found), signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def request(max_tokens: int) -> GenerateRequest:
    stopping = StoppingCriteria(max_new_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(text="Once upon a time", stopping=stopping)


def stream(channel: grpc.Channel, message: GenerateRequest) -> Iterator[GenerateResponse]:
    method = channel.unary_stream(
        "/vllm.Inference/GenerateStream",
        request_serializer=GenerateRequest.SerializeToString,
        response_deserializer=GenerateResponse.FromString,
    )
    return method(message)


def health(channel: grpc.Channel, service: str = "") -> int:
    method = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    return method(HealthCheckRequest(service=service), timeout=PATIENCE, wait_for_ready=True).status
