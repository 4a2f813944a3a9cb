"""``trio-frontend health``: is the server ready, or alive? The exit code says it too."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .arguments import add_client_options

if TYPE_CHECKING:
    from trio_frontend.client import Channel

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
    from .calling import call

    return call(args, _watch if args.watch else _check)


async def _check(args: argparse.Namespace, channel: Channel) -> int:
    from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
    from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest

    answer = await HealthStub(channel).Check(HealthCheckRequest(service=args.service))
    return _say(answer.status)


async def _watch(args: argparse.Namespace, channel: Channel) -> int:
    from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
    from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest

    code = 1
    request = HealthCheckRequest(service=args.service)
    async with channel.stream(HealthStub(channel).Watch, request) as changes:
        async for change in changes:
            code = _say(change.status)
    return code


def _say(status: int) -> int:
    from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckResponse

    print(HealthCheckResponse.ServingStatus.Name(status), flush=True)
    return 0 if status == HealthCheckResponse.SERVING else 1
