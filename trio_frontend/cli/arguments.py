"""Options that several commands share, and the types of arguments."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys

from .errors import UsageError

__all__ = [
    "API_KEY_VARIABLE",
    "DEFAULT_ADDRESS",
    "add_client_options",
    "api_key",
    "check_files",
    "count",
    "own_command",
    "port",
    "positive",
    "seconds",
]

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


def own_command() -> str:
    """How to call us from another terminal: with the path by which we were called, where PATH does not have us."""
    name = "trio-frontend"
    called = sys.argv[0]
    return called if os.path.basename(called) == name and shutil.which(name) is None else name


def check_files(args: argparse.Namespace, *names: str) -> None:
    """UsageError naming the first of these options whose file cannot be read."""
    for name in names:
        path = getattr(args, name)
        if path is not None and not os.access(path, os.R_OK):
            raise UsageError(f"--{name.replace('_', '-')} {path}: no such file, or it cannot be read")


def seconds(text: str) -> float:
    value = _number(text, float)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, 0 or more")
    return value


def count(text: str) -> int:
    value = _number(text, int)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, 0 or more")
    return int(value)


def positive(text: str) -> int:
    value = _number(text, int)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, 1 or more")
    return int(value)


def port(text: str) -> int:
    value = _number(text, int)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: a port is between 0 and 65535")
    return int(value)


def _number(text: str, kind: type[int] | type[float]) -> float:
    """NaN, which is in no range, for what is no number: else argparse would name our function."""
    try:
        return kind(text)
    except ValueError:
        return math.nan
