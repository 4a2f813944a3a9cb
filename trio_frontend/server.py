"""The nursery that holds everything, and the order of shutdown. Read this page first.

::

    serve()
    ├─ listeners             bound first: a taken port is known before a model is loaded
    ├─ calls                 the rpc servers: a task per connection, a task per call
    ├─ engine                opened while health says NOT_SERVING; closed last
    └─ engine monitor        wait_any(the engine's health changed, shutdown began)

Shutdown, whoever asks for it, has one order: health says NOT_SERVING; ``withdrawal_grace`` passes, still serving; listeners close
and clients are told to go (GOAWAY); calls in flight have ``shutdown_timeout`` to finish; the rest end with UNAVAILABLE, and
the engine gets their aborts; health watches end; the engine is closed. :meth:`Server.hurry`, a cancelled nursery and an
exception anywhere in here skip the waits, not the order.

Nothing here installs a signal handler, configures logging or keeps a global: that is for whoever owns the process.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial

import trio
from trio_util import wait_any

from trio_frontend import rpc
from trio_frontend.config import ServerConfig
from trio_frontend.doors import Listeners, make_doors, open_listeners
from trio_frontend.engine.base import Engine, EngineHealth, EngineState
from trio_frontend.engine.starting import StartingEngine
from trio_frontend.model import load_model
from trio_frontend.nurseries import open_private_nursery
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckResponse
from trio_frontend.services.control import ControlService
from trio_frontend.services.health import HealthService
from trio_frontend.services.inference import InferenceService
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.registry import RequestRegistry
from trio_frontend.text import ModelFiles
from trio_frontend.tls import reload_certificate, tls_context

__all__ = ["EngineDiedError", "OpenEngine", "Server", "running", "serve"]

logger = logging.getLogger(__name__)

OpenEngine = Callable[[], AbstractAsyncContextManager[Engine]]
"""Opens an engine for as long as the server runs: the server owns it."""

LAST_ANSWERS_TIMEOUT = 2.0
"""Seconds for calls that were cut off to send their status, and for watchers to take theirs. What is left then is dropped."""

HEALTH = frozenset({"grpc.health.v1.Health"})
"""A watch lasts as long as its client likes: no shutdown waits for one."""

DEAD = frozenset({EngineState.UNHEALTHY, EngineState.LOST})
"""Failures that last until there is a new engine. A stall is none."""


class EngineDiedError(RuntimeError):
    """The engine failed for good, and the server has shut down because of it (``on_engine_death="exit"``)."""

    def __init__(self, health: EngineHealth) -> None:
        super().__init__(f"the engine died ({health.state.value}): {health.detail or 'it gave no reason'}")
        self.health = health


class Server:
    """A server that runs: what :func:`serve` reports to ``nursery.start``.

    ``addresses`` is where it listens, each (host, port) or the path of a Unix socket; ``control_addresses`` where
    ``vllm.Control`` does, if that has listeners of its own. ``health`` is its health service, ``requests`` the live requests.
    """

    def __init__(
        self, config: ServerConfig, model: ModelFiles, tls: ssl.SSLContext | None, listeners: Listeners, *, owns_engine: bool
    ) -> None:
        self.config = config
        self.served_model_names = config.served_model_names or (model.name,)
        self.addresses: Sequence[rpc.Address] = [listener.address for listener in listeners.main]
        self.control_addresses: Sequence[rpc.Address] = [listener.address for listener in listeners.control or ()]
        self.health = HealthService(("vllm.Inference", "vllm.Generate", "vllm.Control"))
        self.requests = RequestRegistry()
        self.engine = StartingEngine()
        """What the services see: the engine once it is open, and before that one that refuses."""
        self.engine_death: EngineHealth | None = None
        self.listening = trio.Event()
        self.started = trio.Event()
        self.calls_ended = trio.Event()
        self.finished = trio.Event()
        self._tls = tls
        self._exits_on_engine_death = (config.on_engine_death or ("exit" if owns_engine else "stay")) == "exit"
        self._begun = trio.Event()
        self._hurried = trio.Event()
        self._told: EngineState | None = None
        loras = LoraRegistry()
        control = ControlService(
            self.engine,
            model_id=model.name,
            served_names=self.served_model_names,
            requests=self.requests,
            loras=loras,
            request_shutdown=partial(self.begin_shutdown, "vllm.Control.Shutdown"),
            lora_path_prefixes=config.lora_path_prefixes,
        )
        inference = InferenceService(self.engine, model, config, self.requests, loras)
        self.loras = control.loras
        self._doors = make_doors(
            config, listeners, inference=inference.services, control=control.service, health=self.health.service
        )

    @property
    def shutting_down(self) -> bool:
        """Whether the shutdown has begun."""
        return self._begun.is_set()

    @property
    def running_handlers(self) -> int:
        """Calls whose task has not ended, health watches included. No handler is left after its client is gone: this shows it."""
        return sum(door.running_handlers for door, _ in self._doors)

    async def shutdown(self) -> None:
        """Shut down in order, with the waits of the config; returns when nothing is left. Safe to call twice.

        If the caller is cancelled meanwhile, the shutdown goes on.
        """
        self.begin_shutdown("shutdown() was called")
        await self.finished.wait()

    def begin_shutdown(self, cause: str) -> None:
        """:meth:`shutdown` without waiting for it. ``cause`` is for the log."""
        if not self._begun.is_set():
            logger.info("shutdown begins: %s", cause)
            self._begun.set()

    def hurry(self, cause: str) -> None:
        """Begin the shutdown if it has not begun, and skip what it waits for."""
        self.begin_shutdown(cause)
        if not self._hurried.is_set() and not self.calls_ended.is_set():
            logger.info("shutdown waits no longer: %s", cause)
            self._hurried.set()

    def reload_certificate(self) -> None:
        """Read the TLS certificate and key again, for connections made from now on. If they are bad the old ones stay: see the log."""
        if self._tls is not None and self.config.tls is not None:
            reload_certificate(self._tls, self.config.tls)

    async def serve_stream(self, stream: trio.abc.Stream, *, peer: str = "stream") -> None:
        """Serve one connection over any Trio stream, as if it had come through the main door, until it ends."""
        await self._doors[0][0].serve_stream(stream, peer=peer)

    # The parts of serve().

    async def serve_calls(self) -> None:
        """Serve until the shutdown begins, then run it in order. Shielded: whatever ends the nursery, the order holds.

        Once hurried, it is bounded by LAST_ANSWERS_TIMEOUT and rpc's own ``close_timeout``.
        """
        try:
            with trio.CancelScope(shield=True):
                async with open_private_nursery() as nursery:
                    for door, listeners in self._doors:
                        await nursery.start(door.serve, listeners)
                    self.listening.set()
                    await self._begun.wait()
                    await self._end_calls()
        finally:
            self.calls_ended.set()

    async def _end_calls(self) -> None:
        doors = [door for door, _ in self._doors]
        self._say(HealthCheckResponse.NOT_SERVING, "server_shutdown")
        if self.engine_death is None and self.config.withdrawal_grace > 0:
            logger.info("still serving for %g s, so that balancers can leave", self.config.withdrawal_grace)
            await self._unless_hurried(self.config.withdrawal_grace, trio.sleep_forever)
        logger.info("listeners close, clients are told to go, calls have %g s to finish", self.config.shutdown_timeout)
        for door in doors:
            door.begin_shutdown(math.inf)
        await self._unless_hurried(self.config.shutdown_timeout, self._drained)
        cut_off = sum(door.cut_off(HEALTH) for door in doors)
        logger.info("no call is left, %d were cut off; %d health watches end", cut_off, self.health.watches)
        self.health.end_watches()
        for door in doors:
            door.begin_shutdown(LAST_ANSWERS_TIMEOUT)
        for door in doors:
            await door.shutdown(math.inf)

    async def _drained(self) -> None:
        for door, _ in self._doors:
            await door.wait_drained(HEALTH)

    async def _unless_hurried(self, seconds: float, wait: Callable[[], Awaitable[object]]) -> None:
        with trio.move_on_after(seconds):
            await wait_any(wait, self._hurried.wait)

    async def follow_engine(self, engine: Engine) -> None:
        """Have health follow the engine's until the shutdown begins."""
        while not self._begun.is_set():
            now: EngineHealth = engine.health.value
            self.heed(now)
            changed = partial(engine.health.wait_value, lambda health, now=now: health != now)
            await wait_any(changed, self._begun.wait)

    def heed(self, now: EngineHealth) -> None:
        """Say what the engine's health means for ours. An engine that has died may be what ends the server."""
        if now.state is self._told:
            return
        self._told = now.state
        self._say(
            HealthCheckResponse.SERVING if now.serving else HealthCheckResponse.NOT_SERVING, now.state.value, now.detail
        )
        if now.state in DEAD and self._exits_on_engine_death:
            self.engine_death = now
            self.begin_shutdown("the engine died")

    async def abandon_start(self, start: trio.CancelScope) -> None:
        """While the server starts there is nothing to wait for: a shutdown that begins then ends the start."""
        await self._begun.wait()
        if not self.started.is_set():
            start.cancel()

    def _say(self, status: HealthCheckResponse.ServingStatus, reason: str, detail: str = "") -> None:
        self.health.set_readiness(status)
        expected = status == HealthCheckResponse.SERVING or self._begun.is_set()
        name = HealthCheckResponse.ServingStatus.Name(status)
        extra = {"reason": reason, **({"detail": detail} if detail else {})}
        logger.log(logging.INFO if expected else logging.WARNING, "health is %s", name, extra=extra)


async def serve(
    engine: Engine | OpenEngine,
    config: ServerConfig | None = None,
    *,
    model: ModelFiles | None = None,
    listeners: Iterable[rpc.Listener] | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``engine`` until shut down or cancelled; either way it ends in order, and nothing is left when this returns.

    ``engine`` is an open one, which stays open, or what opens one, which is then this server's own. ``model`` are the files that
    ``config`` names, if they are loaded already; else a thread reads them. ``listeners`` take the place of those that ``config``
    describes (``rpc.listen_fd`` for an inherited socket; none at all for a server of streams). Meant for
    ``server = await nursery.start(serve, engine, config)``, which returns when the engine is open.

    Raises OSError for an address that cannot be had, ModelFilesError and ssl.SSLError for files that cannot be read, whatever opening
    the engine raises, and EngineDiedError.
    """
    config = config if config is not None else ServerConfig()
    owns_engine = not isinstance(engine, Engine)
    open_engine = partial(_kept_open, engine) if isinstance(engine, Engine) else engine
    tls = tls_context(config.tls) if config.tls is not None else None
    with closing(await open_listeners(config, tls, listeners)) as bound:
        if model is None:
            model = await trio.to_thread.run_sync(load_model, config, abandon_on_cancel=True)
        server = Server(config, model, tls, bound, owns_engine=owns_engine)
        try:
            await _run(server, open_engine, task_status)
        finally:
            server.finished.set()
    if server.engine_death is not None:
        raise EngineDiedError(server.engine_death)
    if not server.started.is_set():
        task_status.started(server)


async def _run(server: Server, open_engine: OpenEngine, task_status: trio.TaskStatus[Server]) -> None:
    async with open_private_nursery() as nursery:
        try:
            # Not nursery.start, which waits for a child behind a shield even when it is cancelled.
            nursery.start_soon(server.serve_calls)
            await server.listening.wait()
            nursery.start_soon(server.abandon_start, nursery.cancel_scope)
            async with open_engine() as engine:
                await _serve_while_open(server, engine, task_status)
        finally:
            server.hurry("the start did not finish")
        nursery.cancel_scope.cancel()


async def _serve_while_open(server: Server, engine: Engine, task_status: trio.TaskStatus[Server]) -> None:
    """Serve until the shutdown has ended all calls: before that nobody may leave this, and close the engine under them."""
    server.engine.become(engine)
    try:
        for module in server.config.lora_modules:
            await server.loras.load_trusted(module.name, module.path)
        server.started.set()
        server.heed(engine.health.value)
        task_status.started(server)
        await server.follow_engine(engine)
        await server.calls_ended.wait()
    finally:
        server.hurry("the nursery was cancelled")
        with trio.CancelScope(shield=True):
            await server.calls_ended.wait()


@asynccontextmanager
async def _kept_open(engine: Engine) -> AsyncIterator[Engine]:
    yield engine


@asynccontextmanager
async def running(
    engine: Engine | OpenEngine,
    config: ServerConfig | None = None,
    *,
    model: ModelFiles | None = None,
    listeners: Iterable[rpc.Listener] | None = None,
) -> AsyncIterator[Server]:
    """A server that runs while the block does: ``async with running(engine, config) as server``.

    Leaving the block is :meth:`Server.shutdown`; an exception or a cancel in the block ends the server as a cancelled nursery does. If
    the server fails meanwhile, the block is cancelled and the failure raised here. Takes and raises what :func:`serve` does.
    """
    async with open_private_nursery() as nursery:
        server: Server = await nursery.start(partial(serve, engine, config, model=model, listeners=listeners))
        yield server
        await server.shutdown()
