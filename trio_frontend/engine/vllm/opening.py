"""Opening an engine, and what is said while it starts."""

from __future__ import annotations

import logging
import pathlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from trio_frontend.engine.vllm.client import MissingStep, VllmEngine, VllmOptions
from trio_frontend.engine.vllm.endpoints import Endpoints, IpcEndpoints, TcpEndpoints, parse_tcp
from trio_frontend.engine.vllm.transport import open_context

__all__ = ["EngineStartError", "Progress", "open_engine", "start_engine", "wait_started"]

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL: Final = 10.0
"""Seconds between two reports of the same wait."""

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
        address, endpoints = _endpoints(handshake_address, options, pathlib.Path(directory))
        async with open_context() as context, _nursery() as nursery:
            engine = VllmEngine(context, nursery, address, endpoints, options)
            nursery.start_soon(engine.run)
            logger.info("waiting for %d engine(s) at %s", options.data_parallel_size, engine.handshake_address)
            try:
                yield engine
            finally:
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def _nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that is no business of the block's: what the block raises comes out as it is, not in a group."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        error = group.exceptions[0]
        try:
            raise error
        finally:
            del error, group


def _endpoints(handshake_address: str, options: VllmOptions, directory: pathlib.Path) -> tuple[str, Endpoints]:
    if handshake_address.startswith("ipc://"):
        return handshake_address, IpcEndpoints(directory)
    host, _ = parse_tcp(handshake_address)
    return handshake_address, TcpEndpoints(host, options.advertise_host)


async def wait_started(engine: VllmEngine, timeout: float, on_progress: Progress | None = None) -> None:
    """Until every engine serves. EngineStartError if one does not within ``timeout`` seconds."""
    report = on_progress if on_progress is not None else log_progress
    with trio.move_on_after(timeout) as scope:
        async with trio.open_nursery() as nursery:
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
    while True:
        report(engine.missing())
        with trio.move_on_after(PROGRESS_INTERVAL):
            await engine.changed.wait()


def log_progress(missing: Sequence[MissingStep]) -> None:
    """Write what is waited for to the log."""
    if missing:
        logger.info("waiting for %s", "; ".join(map(str, missing)))
