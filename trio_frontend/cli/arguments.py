"""Options that several commands share, and the types of arguments."""

from __future__ import annotations

import argparse
import math
import os

__all__ = ["API_KEY_VARIABLE", "DEFAULT_ADDRESS", "add_client_options", "api_key", "count", "positive", "seconds"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
API_KEY_VARIABLE = "TRIO_FRONTEND_API_KEY"


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """How a client command reaches a server: ``address``, ``api_key``, ``tls``, ``ssl_*``, ``timeout``."""
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="where it listens; unix:PATH for a Unix socket (default: %(default)s)",
    )
    group.add_argument("--timeout", type=seconds, metavar="S", help="give up after so many seconds (default: no limit)")
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: ${API_KEY_VARIABLE})")
    group.add_argument("--tls", action="store_true", help="talk TLS, checked against the system's authorities")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="talk TLS, checked against these authorities (PEM)")
    group.add_argument("--ssl-certfile", metavar="FILE", help="our own certificate (PEM), for a server that asks for one")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key, if it is not in the same file")


def api_key(args: argparse.Namespace) -> str | None:
    """The key of the command line, else of the environment. Not a default of argparse's, which ``--help`` would print."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def seconds(text: str) -> float:
    value = float(text)
    if math.isnan(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, 0 or more")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: 0 or more")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 or more")
    return value
