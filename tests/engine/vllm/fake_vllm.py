#!/usr/bin/env python3
"""Stands in for the ``vllm`` command: runs the mock engine as a child, as ``vllm serve --headless`` runs its engine cores.

What it does besides is in the environment: FAKE_VLLM is a comma-separated list of
    print       write a few lines in vLLM's format, and one that never ends
    exit        exit with code 3 before anything
    stubborn    ignore SIGTERM, child included
    orphan      exit on SIGTERM at once and leave the child, which ignores it
    silent      never say HELLO
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

MOCK_ENGINE = pathlib.Path(__file__).parents[3] / "benchmarks" / "mock_engine.py"
modes = os.environ.get("FAKE_VLLM", "").split(",")
arguments = sys.argv[1:]

print("arguments:", *arguments, flush=True)
if "print" in modes:
    print("(EngineCore pid=1) WARNING 11-30 14:36:31 [vllm.py:1] careful", flush=True)
    print("(EngineCore pid=1) ERROR 11-30 14:36:31 [vllm.py:1] broken", file=sys.stderr, flush=True)
    print("x" * 20_000, flush=True)
if "exit" in modes:
    print("RuntimeError: no such model", flush=True)
    sys.exit(3)
if "stubborn" in modes or "orphan" in modes:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "silent" in modes:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
else:
    port = arguments[arguments.index("--data-parallel-rpc-port") + 1]
    command = [sys.executable, str(MOCK_ENGINE), "--handshake", f"tcp://127.0.0.1:{port}", "--step-ms", "1"]
child = subprocess.Popen(command)
print("child", child.pid, flush=True)
if "orphan" in modes:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
elif "stubborn" not in modes:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(child.kill()))
while child.poll() is None:
    time.sleep(0.05)
sys.exit(1)
