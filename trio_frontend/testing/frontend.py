"""A server in memory: the whole of it, from HTTP/2 frames to the engine, without a port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio
import trio.testing

from trio_frontend.client import Channel, open_channel
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import Engine
from trio_frontend.model import load_model
from trio_frontend.nurseries import open_private_nursery
from trio_frontend.server import OpenEngine, Server, running

__all__ = ["Frontend", "open_frontend"]


class Frontend:
    """A server and the way to it. Made by :func:`open_frontend`."""

    def __init__(self, server: Server, nursery: trio.Nursery) -> None:
        self.server = server
        self._nursery = nursery

    def open_stream(self) -> trio.abc.Stream:
        """A client's end of a new connection: a memory stream that speaks HTTP/2. Closing it is the client's going away."""
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: trio.abc.Stream) -> None:
        # A connection of a listener is the server's own, and ends when the server ends it. So does this one, though its task is ours.
        with trio.CancelScope(shield=True):
            await self.server.serve_stream(stream)

    @asynccontextmanager
    async def connect(self, *, metadata: Iterable[tuple[str, str | bytes]] = ()) -> AsyncIterator[Channel]:
        """A new connection as a channel for stubs; it closes at the end of the block. ``metadata`` goes with every call."""
        async with open_channel(self.open_stream(), "localhost", metadata=metadata) as channel:
            yield channel


@asynccontextmanager
async def open_frontend(engine: Engine | OpenEngine, config: ServerConfig | None = None) -> AsyncIterator[Frontend]:
    """Serve ``engine`` in memory while the block runs; what ``config`` says of addresses does not matter.

    Leaving the block shuts the server down in order, as :func:`trio_frontend.running` does, and raises what it does.
    """
    config = config if config is not None else ServerConfig()
    # Not in a thread: an autojump clock does not know of threads, and would jump over every timeout meanwhile.
    model = load_model(config)
    async with open_private_nursery() as nursery, running(engine, config, model=model, listeners=()) as server:
        yield Frontend(server, nursery)
