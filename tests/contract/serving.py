"""A server over a scripted engine, in a thread with a Trio loop of its own, for clients that are not of Trio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from tests.contract.in_process import play
from tests.services.inference_rig import Rig, make_rig
from trio_frontend import rpc
from trio_frontend.config import ServerConfig

__all__ = ["serving"]


@contextmanager
def serving(rig: Rig | None = None) -> Iterator[str]:
    """The address, HOST:PORT, while the server runs."""
    rig = rig if rig is not None else make_rig(config=ServerConfig(served_model_names=("tiny", "tiny-alias")))
    ready = threading.Event()
    state: dict[str, object] = {}

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            state["token"], state["scope"] = trio.lowlevel.current_trio_token(), nursery.cancel_scope
            await nursery.start(rig.engine.play, play)
            host, port = (await nursery.start(rpc.serve, rig.service.services))[0]
            state["address"] = f"{host}:{port}"
            ready.set()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            state["error"] = error
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    ready.wait()
    try:
        assert "address" in state, state.get("error")
        yield str(state["address"])
    finally:
        token, scope = state.get("token"), state.get("scope")
        if isinstance(token, trio.lowlevel.TrioToken) and isinstance(scope, trio.CancelScope):
            token.run_sync_soon(scope.cancel)
        thread.join()
    assert "error" not in state, state["error"]
