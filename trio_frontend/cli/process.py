"""The process that ``trio-frontend serve`` is: its log, its signals, its exit code.

Rules that hold here:

* SIGTERM and SIGINT begin the shutdown, a second one skips its waits. While the engine starts there is nothing to wait for. SIGHUP
  reads the TLS certificate again; without TLS it means, as ever, that the terminal is gone. Once the server has ended they mean
  nothing: Python takes some time to end too, and it was asked to already.
* Exit codes: 0 it was asked to end, 1 it failed, and then the last line on stderr says why.
* Who reads stdout or stderr may leave: the server goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial

import trio

from trio_frontend.config import ServerConfig
from trio_frontend.nurseries import open_private_nursery
from trio_frontend.server import Server, serve

from .arguments import DEFAULT_ADDRESS, own_command
from .collector import tune_collector
from .engines import opener
from .logs import configure_logging, have_the_hub_log_through_us
from .serve import EngineChoice

__all__ = ["run_server"]

logger = logging.getLogger(__name__)


def run_server(args: argparse.Namespace, choice: EngineChoice, config: ServerConfig) -> int:
    """Serve until asked to end. Returns 0; a failure is raised, not in groups."""
    _open_standard_streams()
    configure_logging(args.log_level, args.log_format)
    if any(name is not None and not os.path.exists(name) for name in (choice.model, args.tokenizer, args.hf_config_path)):
        have_the_hub_log_through_us()
    trio.run(_serve_until_told, args, choice, config)
    return 0


async def _serve_until_told(args: argparse.Namespace, choice: EngineChoice, config: ServerConfig) -> None:
    signals = _signals(config)
    with trio.open_signal_receiver(*signals) as received:
        async with open_private_nursery() as nursery:
            lifetime = Lifetime()
            nursery.start_soon(lifetime.obey, received)
            # This one ends when the server does, whoever ended it.
            async with open_private_nursery() as serving:
                with lifetime.start_up:
                    lifetime.server = await serving.start(partial(serve, opener(args, choice), config))
                if lifetime.server is not None:
                    tune_collector()
                    announce(lifetime.server, choice)
            nursery.cancel_scope.cancel()
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    logger.info("ended")


class Lifetime:
    """What a signal ends: the start-up, then the server, then the server's patience."""

    def __init__(self) -> None:
        self.start_up = trio.CancelScope()
        self.server: Server | None = None

    async def obey(self, received: AsyncIterator[int]) -> None:
        async for number in received:
            name = signal.Signals(number).name
            if self.server is None:
                logger.info("%s during start-up", name)
                self.start_up.cancel()
            elif number == signal.SIGHUP and self.server.config.tls is not None:
                self.server.reload_certificate()
            elif self.server.shutting_down:
                self.server.hurry(f"{name} again")
            else:
                self.server.begin_shutdown(name)


def _signals(config: ServerConfig) -> list[signal.Signals]:
    wanted = [signal.SIGINT, signal.SIGTERM]
    # nohup has SIGHUP ignored for its child, and that is to stay so unless there is a certificate to read again.
    if config.tls is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    return wanted


def announce(server: Server, choice: EngineChoice) -> None:
    """Say on stdout what is served where, and how to try it. Nobody needs to be there to read it."""
    where = [_format(address) for address in server.addresses]
    lines = [f"Serving {', '.join(server.served_model_names)} ({choice.kind} engine) on {', '.join(where)}"]
    if server.control_addresses:
        lines.append(f"Serving vllm.Control on {', '.join(map(_format, server.control_addresses))}")
    reachable = where[0].replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    options = "" if reachable == DEFAULT_ADDRESS else f" --address {reachable}"
    if server.config.tls is not None:
        options += f" --ssl-ca-certs {server.config.tls.certfile}"
    if server.config.api_keys:
        options += " --api-key KEY"
    lines.append(f'Try it: {own_command()} generate "Once upon a time"{options}')
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # What was printed waits in the buffer, and Python would try to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _format(address: tuple[str, int] | str) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_standard_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed: else the next socket would become it, and be printed into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
