"""``trio-frontend health``: is the server ready, or alive? The exit code says it too."""

from __future__ import annotations

import argparse

from .arguments import add_client_options

__all__ = ["add_commands"]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "health",
        help="ask a server for its health",
        description="Print a server's health (grpc.health.v1). Exit code 0 for SERVING, 1 for anything else.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="vllm.Inference, vllm.Generate, vllm.Control, or liveness: is the process alive, whatever its engine does "
        "(default: the server as a whole)",
    )
    parser.add_argument("--watch", action="store_true", help="print each change until interrupted or the server ends")
    add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    from .calls import print_health

    return print_health(args)
