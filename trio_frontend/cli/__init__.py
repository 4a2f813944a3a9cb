"""Arguments in, exit code out.

Rules that hold here:

* A command is a module with ``add_commands(commands)``, which adds its parsers and sets ``run``, a function from the
  parsed arguments to the exit code. What is imported at the top of such a module is paid for by ``--help``: no Trio, no
  protobuf, no engine. ``run`` imports what it needs.
* What goes wrong is one line on stderr. Only a fault of our own, which no user can mend, has its traceback before that line.
  Exit codes: 0 done as asked, 1 it failed, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from .errors import CommandError, UsageError, faults, one_line

__all__ = ["CommandError", "UsageError", "build_parser", "main"]

PROGRAM = "trio-frontend"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and, but for argparse's own exits on ``--help`` and bad usage, never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    passed_through: list[str] = []
    if words[:1] == ["serve"] and "--" in words:
        # What follows is the engine's; argparse would take it for more positional arguments.
        at = words.index("--")
        words, passed_through = words[:at], words[at + 1 :]
    try:
        args = build_parser().parse_args(words)
    except KeyboardInterrupt:
        return 130
    args.passed_through = passed_through
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(f"{PROGRAM} {args.command}: error: {error}", 2)
    except CommandError as error:
        return _fail(f"{PROGRAM} {args.command}: {error}", error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (``| head``). Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - here it becomes the exit code
        for fault in faults(error):
            _complain("".join(traceback.format_exception(fault)).rstrip())
        return _fail(f"{PROGRAM} {args.command}: {one_line(error)}", 1)


def build_parser() -> argparse.ArgumentParser:
    from . import control, generate, health, serve

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="vLLM's gRPC API, served from Trio.",
        epilog=f"'{PROGRAM} serve' with no argument serves a small model that comes with the package; "
        f"'{PROGRAM} generate \"Once upon a time\"' talks to it from another terminal.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (serve, generate, health, control):
        module.add_commands(commands)
    return parser


class _Version(argparse.Action):
    """Reading the installed package's metadata takes longer than all the rest of --help: only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        parser.exit(0, f"{PROGRAM} {version('trio-frontend')}\n")


def _fail(line: str, code: int) -> int:
    _complain(line)
    return code


def _complain(text: str) -> None:
    # stderr may be closed or gone; the exit code still tells.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
