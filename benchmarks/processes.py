"""Processes under measurement: started here, ended here, their CPU and memory read from /proc."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """User and system time that ``pid`` has used, in seconds (resolution: one clock tick, 10 ms)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_SIZE


@contextmanager
def running(command: Sequence[str], *, log: pathlib.Path, **popen: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` with its output in ``log``; SIGTERM, then SIGKILL after five seconds, on the way out."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **popen)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: pathlib.Path, timeout: float = 60) -> None:
    """Return once ``port`` accepts a connection; SystemExit with the log's end if ``process`` ends first or time is up."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"{process.args} does not serve port {port}; its log ends:\n{log.read_text(errors='replace')[-2000:]}")
