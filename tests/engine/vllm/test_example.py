"""The documented client of the engine runs as it is written."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.process
def test_the_example_talks_to_an_engine() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(ROOT / "benchmarks/mock_engine.py"), "--handshake", address, "--step-ms", "5"]
    engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        example = [sys.executable, str(ROOT / "examples/engine_client.py"), address]
        out = subprocess.run(example, capture_output=True, text=True, timeout=30, check=True).stdout
    finally:
        engine.kill()
        engine.wait()
    for number in range(3):
        assert f"request {number}: [300]" in out
        assert f"request {number}: that were 5 tokens" in out
    assert "cut off: [300]" in out
    assert "live requests: 0" in out
    assert "is it asleep? [False]" in out
