"""A real vLLM engine for tests marked ``real_engine``: what ``tools/real_engine_setup.sh`` installed, on the CPU, with the model
that the package ships. A server over it takes about 45 seconds to start: start one for a whole module."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from trio_frontend.engine.embedded import SHIPPED_MODEL

VLLM_DIR = Path(os.environ.get("VLLM_DIR", Path.home() / ".cache" / "trio-frontend" / "vllm"))
VLLM = VLLM_DIR / "venv" / "bin" / "vllm"
MODEL = Path(os.environ.get("TRIO_FRONTEND_TEST_MODEL", SHIPPED_MODEL))
"""A Hugging Face directory of a small Llama model."""
ENGINE_ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64", "--enforce-eager")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
START_TIMEOUT = 300.0


def require_vllm() -> Path:
    """The vllm command. These tests are asked for by name, so that without it they fail and say what to do."""
    if not VLLM.exists():
        pytest.fail(f"there is no {VLLM}: run tools/real_engine_setup.sh")
    return VLLM


@contextmanager
def serving(
    *options: str, engine_arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """``trio-frontend serve`` with an engine of its own, as a process: its address, once it serves."""
    command = [sys.executable, "-m", "trio_frontend", "serve", str(MODEL), "--engine", "vllm", "--vllm", str(require_vllm())]
    command += ["--port", "0", "--shutdown-timeout", "5", *options, "--", *ENGINE_ARGUMENTS, *engine_arguments]
    with started(command, environment, re.compile(r"Serving .* on (\S+:\d+)$")) as address:
        yield address


@contextmanager
def serving_vllms_own(
    port: int, *options: str, engine_arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """vLLM's own gRPC frontend over an engine of its own, on ``port`` (and HTTP on the one above)."""
    command = [str(require_vllm()), "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port + 1)]
    command += ["--grpc-port", str(port), *options, *ENGINE_ARGUMENTS, *engine_arguments]
    variables = {**(environment or {}), "VLLM_USE_RUST_FRONTEND": "1"}
    with started(command, variables, re.compile("gRPC server is ready")):
        yield f"127.0.0.1:{port}"


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str] | None, ready: re.Pattern[str]) -> Iterator[str]:
    """Run ``command`` until a line of its output matches ``ready``, give the match's first group, and end it with SIGTERM."""
    path = os.pathsep.join([str(VLLM.parent), os.environ["PATH"]])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PATH": path, **ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        yield _wait(command, lines, ready)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _wait(command: Sequence[str], lines: queue.Queue[str | None], ready: re.Pattern[str]) -> str:
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=START_TIMEOUT)
        except queue.Empty:
            line = None
        if line is None:
            pytest.fail("\n".join([f"{command[0]} did not start; its last lines:", *seen[-40:]]))
        seen.append(line)
        found = ready.search(line)
        if found is not None:
            return found[1] if found.groups() and found[1] else ""
