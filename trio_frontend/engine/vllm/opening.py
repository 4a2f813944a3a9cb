"""Opening an engine, and what is said while it starts."""

from __future__ import annotations

import logging
import pathlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from trio_frontend.engine.base import EngineState
from trio_frontend.engine.vllm.client import MissingStep, VllmEngine, VllmOptions
from trio_frontend.engine.vllm.endpoints import Endpoints, IpcEndpoints, TcpEndpoints, parse_tcp
from trio_frontend.engine.vllm.process import EngineProcess, engine_command, find_vllm, run_process
from trio_frontend.engine.vllm.sockets import Addresses
from trio_frontend.engine.vllm.transport import open_context
from trio_frontend.nurseries import open_private_nursery

__all__ = ["EngineStartError", "Progress", "join_engines", "launch_engine", "open_engine", "start_engine", "wait_started"]

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL: Final = 10.0
"""Seconds between two reports of the same wait."""

LAST_LINES_TIMEOUT: Final = 0.5
"""Seconds to wait for the rest of the output of an engine that has exited: its children may hold it open."""

Progress = Callable[[Sequence[MissingStep]], None]
"""Is called with what a start waits for, whenever that changes and every 10 seconds; with nothing at its end."""


class EngineStartError(Exception):
    """The engine did not start: the message says what is missing, and from which rank."""


@asynccontextmanager
async def open_engine(
    *,
    handshake_address: str,
    options: VllmOptions | None = None,
    start_timeout: float = 600.0,
    on_progress: Progress | None = None,
) -> AsyncIterator[VllmEngine]:
    """A vLLM engine that was started elsewhere (``vllm serve MODEL --headless ...``), once it serves.

    Binds ``handshake_address`` (``tcp://HOST:PORT``) and waits up to ``start_timeout`` seconds for the engines. Leaving the block
    aborts what is live and closes every socket; the engines themselves stay.

    Raises :class:`EngineStartError` if an engine did not join in time, OSError if the address cannot be bound, ValueError for
    an address or option that is none.
    """
    async with start_engine(handshake_address=handshake_address, options=options) as engine:
        await wait_started(engine, start_timeout, on_progress)
        yield engine


@asynccontextmanager
async def start_engine(*, handshake_address: str, options: VllmOptions | None = None) -> AsyncIterator[VllmEngine]:
    """Like :func:`open_engine`, but entered at once, while the engine's health is still STARTING."""
    options = options if options is not None else VllmOptions()
    with tempfile.TemporaryDirectory(prefix="trio-frontend-") as directory:
        if handshake_address.startswith("ipc://"):
            endpoints: Endpoints = IpcEndpoints(pathlib.Path(directory))
        else:
            endpoints = TcpEndpoints(parse_tcp(handshake_address)[0], options.advertise_host)
        async with _client(options) as engine:
            engine.listen(handshake_address, endpoints)
            logger.info("waiting for %d engine(s) at %s", options.data_parallel_size, engine.handshake_address)
            yield engine


@asynccontextmanager
async def join_engines(addresses: Sequence[Addresses], *, options: VllmOptions | None = None) -> AsyncIterator[VllmEngine]:
    """Engines that another process does the handshake with: one frontend of several, by ``options.client_index``.

    ``addresses`` are bound here, a pair for each rank; that process has them in its ``VllmOptions.other_frontends``. Entered at
    once, as :func:`start_engine` is.
    """
    async with _client(options if options is not None else VllmOptions()) as engine:
        engine.join(addresses)
        yield engine


@asynccontextmanager
async def launch_engine(
    model: str,
    *,
    vllm: str = "vllm",
    arguments: Sequence[str] = (),
    options: VllmOptions | None = None,
    start_timeout: float = 600.0,
    stop_timeout: float = 15.0,
    on_progress: Progress | None = None,
) -> AsyncIterator[VllmEngine]:
    """Start ``vllm serve MODEL --headless`` on this machine and own it: it serves within the block, and has ended after it.

    ``vllm`` is the command (a path, or looked up on PATH), ``arguments`` are passed on to it. It gets SIGTERM in the end, and
    SIGKILL if it has not ended ``stop_timeout`` seconds later. If it dies, health says LOST, with its exit code.

    Raises :class:`VllmNotFoundError` if there is no vLLM, :class:`EngineStartError` if it exits or is not ready within
    ``start_timeout`` seconds, ValueError for an argument that is not the caller's to give.
    """
    options = options if options is not None else VllmOptions()
    command = find_vllm(vllm)
    with tempfile.TemporaryDirectory(prefix="trio-frontend-") as directory:
        async with _client(options) as engine:
            engine.listen("tcp://127.0.0.1:*", IpcEndpoints(pathlib.Path(directory)))
            port = int(parse_tcp(engine.handshake_address)[1])
            argv = engine_command(command, model, port, options.data_parallel_size, arguments)
            async with run_process(argv, stop_timeout=stop_timeout) as process, open_private_nursery() as nursery:
                nursery.start_soon(_watch_exit, process, engine)
                async with open_private_nursery() as starting:
                    starting.start_soon(_fail_on_exit, process)
                    await wait_started(engine, start_timeout, on_progress)
                    starting.cancel_scope.cancel()
                try:
                    yield engine
                finally:
                    nursery.cancel_scope.cancel()
                    engine.end()


@asynccontextmanager
async def _client(options: VllmOptions) -> AsyncIterator[VllmEngine]:
    async with open_context() as context, open_private_nursery() as nursery:
        engine = VllmEngine(context, nursery, options)
        try:
            yield engine
        finally:
            engine.end()
            nursery.cancel_scope.cancel()


async def _watch_exit(process: EngineProcess, engine: VllmEngine) -> None:
    await process.wait()
    engine.fail_all(EngineState.LOST, f"its process {process.describe_exit()}")


async def _fail_on_exit(process: EngineProcess) -> None:
    await process.wait()
    with trio.move_on_after(LAST_LINES_TIMEOUT):
        await process.output_ended.wait()
    lines = "\n".join(process.last_lines)
    raise EngineStartError(f"vLLM {process.describe_exit()} before it was ready. Its last lines:\n{lines}")


async def wait_started(engine: VllmEngine, timeout: float, on_progress: Progress | None = None) -> None:
    """Until every engine serves. EngineStartError if one does not within ``timeout`` seconds."""
    report = on_progress if on_progress is not None else log_progress
    with trio.move_on_after(timeout) as scope:
        async with open_private_nursery() as nursery:
            nursery.start_soon(_report, engine, report)
            await engine.health.wait_value(lambda health: health.serving)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        missing = "; ".join(map(str, engine.missing()))
        strangers = "; ".join(engine.strangers)
        raise EngineStartError(
            f"not every engine joined at {engine.handshake_address} within {timeout:g} s. Missing from {missing}."
            + (f" Ignored: {strangers}." if strangers else "")
        )
    report(())


async def _report(engine: VllmEngine, report: Progress) -> None:
    while missing := engine.missing():
        report(missing)
        with trio.move_on_after(PROGRESS_INTERVAL):
            await engine.changed.wait()


def log_progress(missing: Sequence[MissingStep]) -> None:
    """Write to the log what each rank is waited for next."""
    next_of = {step.rank: step for step in reversed(missing)}
    if next_of:
        logger.info("waiting for %s", "; ".join(str(next_of[rank]) for rank in sorted(next_of)))
