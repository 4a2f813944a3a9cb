"""vLLM's Rust frontend over the mock engine: the peer that counts.

    python -m benchmarks.peers.rust_frontend PORT MODEL_DIR [mock engine options]

The binary is ``vllm/vllm-rs`` of the vllm wheel; tools/real_engine_setup.sh leaves it where VLLM_RS points by default.
Prints ``frontend PID`` and ``engine PID``; SIGTERM ends both.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from types import FrameType

BINARY = pathlib.Path(os.environ.get("VLLM_RS", pathlib.Path.home() / ".cache/trio-frontend/vllm/vllm-rs"))
MOCK_ENGINE = pathlib.Path(__file__).parent.parent / "mock_engine.py"


def listener(port: int = 0) -> socket.socket:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", port))
    s.listen(4096)
    s.set_inheritable(True)
    return s


def main() -> None:
    port, model, options = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    sockets = [listener(), listener(port), listener(), listener()]  # HTTP, gRPC, engine inputs, engine outputs
    arguments = {
        "model": model,
        "model_tag": model,
        "served_model_name": ["tiny"],
        "engine_ready_timeout_secs": 60,
        "max_model_len": 8192,
    }
    command = [str(BINARY), "frontend"]
    names = ("--listen-fd", "--grpc-listen-fd", "--input-listener-fd", "--output-listener-fd")
    for name, s in zip(names, sockets, strict=True):
        command += [name, str(s.fileno())]
    command += ["--engine-start-index", "0", "--engine-count", "1", "--data-parallel-size", "1"]
    command += ["--args-json", json.dumps(arguments)]
    environment = dict(os.environ, RUST_LOG="error", VLLM_LOGGING_LEVEL="ERROR")
    frontend = subprocess.Popen(command, pass_fds=[s.fileno() for s in sockets], env=environment)
    addresses = [f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in sockets[2:]]
    for s in sockets:
        s.close()
    engine_command = [sys.executable, str(MOCK_ENGINE), "--input", addresses[0], "--output", addresses[1], *options]
    engine = subprocess.Popen(engine_command)
    print("frontend", frontend.pid, flush=True)
    print("engine", engine.pid, flush=True)

    def end(signum: int, frame: FrameType | None) -> None:
        engine.kill()
        frontend.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    frontend.wait()
    engine.kill()


if __name__ == "__main__":
    main()
