"""The whole server over a scripted engine, in a thread with a Trio loop of its own, for clients that are not of Trio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from tests.contract.cases import MAX_MODEL_LEN
from tests.contract.in_process import play
from tests.services.inference_rig import model
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import Capabilities, EngineInfo
from trio_frontend.server import running
from trio_frontend.testing.engine import ScriptedEngine

__all__ = ["ServedEngine", "serving"]

PACE = 0.0
INFO = EngineInfo(
    max_model_len=MAX_MODEL_LEN,
    num_gpu_blocks=4096,
    block_size=16,
    vllm_version="0.32.0",
    instance_id="scripted",
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)


class ServedEngine:
    """``engine`` belongs to the server's thread: look at it, and touch it only through ``run``."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.address = ""
        self.token: trio.lowlevel.TrioToken | None = None


@contextmanager
def serving(pace: float = PACE) -> Iterator[ServedEngine]:
    """A server that answers with the cases' scripts, a step each ``pace`` seconds, while the block runs."""
    engine = ScriptedEngine(capabilities=Capabilities(max_model_len=MAX_MODEL_LEN, engines=(INFO,)))
    served = ServedEngine(engine)
    ready, scope = threading.Event(), trio.CancelScope()
    failures: list[BaseException] = []

    async def main() -> None:
        config = ServerConfig(port=0, served_model_names=("tiny", "tiny-alias"), shutdown_timeout=0.0)
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.play, play, pace)
                async with running(engine, config, model=model()) as server:
                    served.token = trio.lowlevel.current_trio_token()
                    host, port = server.addresses[0]
                    served.address = f"{host}:{port}"
                    ready.set()
                    await trio.sleep_forever()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    ready.wait()
    try:
        assert not failures, failures[0]
        yield served
    finally:
        if served.token is not None:
            served.token.run_sync_soon(scope.cancel)
        thread.join()
    assert not failures, failures[0]
