"""``trio-frontend generate``: a prompt in, text out as it streams."""

from __future__ import annotations

import argparse

from .arguments import add_client_options, count, positive

__all__ = ["add_commands"]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Send a prompt and print the text as it streams. Ctrl-C cancels the request in the engine.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; '-' reads it from stdin")
    parser.add_argument("--model", default="", metavar="NAME", help="a served name, or a loaded LoRA adapter's")
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=128,
        metavar="N",
        help="at most so many; 0: all that is left (default: %(default)s)",
    )
    parser.add_argument("--min-tokens", type=count, default=0, metavar="N", help="no end before so many")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's, which is 0)")
    parser.add_argument("--top-p", type=float, default=0.0, metavar="P", help="(default: the model's)")
    parser.add_argument("--top-k", type=count, default=0, metavar="K", help="(default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on when the model says that it is done")
    parser.add_argument(
        "--n", type=positive, default=1, metavar="N", help="so many continuations; each printed when it ends"
    )
    add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    from .calls import print_generated

    return print_generated(args)
