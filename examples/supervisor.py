r"""Keeps serving while the engine behind it comes and goes: a supervisor that starts a vLLM engine, and starts it again when it ends.

    python examples/supervisor.py MODEL tcp://127.0.0.1:5570 -- vllm serve MODEL --headless \
        --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 5570 --data-parallel-size-local 1

(``-- python benchmarks/mock_engine.py --handshake tcp://127.0.0.1:5570 --step-ms 20`` is an engine without a model.)

Between two engines health says NOT_SERVING and calls are UNAVAILABLE; the address, the connections and the watches stay.
Ctrl-C ends both.
"""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial

import trio

import trio_frontend

LONGEST_PAUSE = 30.0
"""Seconds between two starts of an engine that ends at once."""


async def keep_running(command: list[str]) -> None:
    """Run the engine for ever. A cancel ends it: SIGTERM, and SIGKILL if that is not enough."""
    pause = 0.5
    while True:
        begun = trio.current_time()
        process = await trio.run_process(command, check=False, stdout=sys.stderr)
        if trio.current_time() - begun > LONGEST_PAUSE:
            pause = 0.5
        logging.warning("the engine ended with %s, and starts again in %g s", process.returncode, pause)
        await trio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def main(model: str, handshake_address: str, command: list[str]) -> None:
    config = trio_frontend.ServerConfig(model=model, on_engine_death="stay")
    open_engine = partial(trio_frontend.open_engine, handshake_address=handshake_address)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, command)
            server = await nursery.start(trio_frontend.serve, open_engine, config)
            print("serving on {}:{}".format(*server.addresses[0]), flush=True)
            await anext(signals)
            await server.shutdown()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        raise SystemExit(__doc__)
    logging.basicConfig(level=logging.INFO)
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[4:])
