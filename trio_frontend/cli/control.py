"""The operator's commands: ``info``, ``abort``, ``lora``, ``pause``, ``resume``, ``sleep``, ``wake``, ``weights``.

Each is one call of ``vllm.Control`` (``info`` is three) and prints a line or two for people, or with ``--json`` the answer as
protobuf's JSON has it, under the field names of the .proto file. What the server refuses is a line on stderr and exit code 1.
"""

from __future__ import annotations

import argparse

from .arguments import add_client_options, count

__all__ = ["add_commands"]

Commands = argparse._SubParsersAction  # argparse has no public name for it

PAUSE_MODES = ("abort", "wait", "keep")
MODE_HELP = "running requests: end them, let them finish first, or keep them for later (default: abort)"


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the parsers of this module's commands."""
    _add(commands, "info", "show the server's model, engines and features")

    abort = _add(commands, "abort", "end running requests")
    abort.add_argument("request_ids", nargs="+", metavar="ID", help="a request's id, as its caller gave it")

    _add_lora(commands)

    pause = _add(commands, "pause", "stop generating, until 'resume'")
    pause.add_argument("--mode", choices=PAUSE_MODES, default="abort", help=MODE_HELP)
    pause.add_argument("--keep-cache", action="store_true", help="do not forget cached prefixes")
    _add(commands, "resume", "generate again")

    sleep = _add(commands, "sleep", "free the engine's memory, until 'wake' (vLLM's --enable-sleep-mode)")
    sleep.add_argument(
        "--level",
        type=count,
        default=1,
        metavar="N",
        help="0: only pause; 1: weights move to the host's memory; 2: weights are dropped (default: 1)",
    )
    sleep.add_argument("--mode", choices=PAUSE_MODES, default="abort", help=MODE_HELP)
    wake = _add(commands, "wake", "take the memory back and generate again")
    wake.add_argument("tags", nargs="*", metavar="TAG", help="weights, kv_cache, scheduling (default: everything)")

    weights = commands.add_parser("weights", help="the model's weights", description="The model's weights.")
    version = _add(_subcommands(weights), "weights version", "show, or set, the name of the loaded weights")
    version.add_argument("version", nargs="?", metavar="VERSION", help="the new name (default: show the present one)")


def _add_lora(commands: Commands[argparse.ArgumentParser]) -> None:
    lora = commands.add_parser(
        "lora", help="list, load and unload LoRA adapters", description="LoRA adapters (vLLM's --enable-lora)."
    )
    subcommands = _subcommands(lora)
    _add(subcommands, "lora list", "list the loaded adapters")
    load = _add(subcommands, "lora load", "load an adapter")
    load.add_argument("name", metavar="NAME", help="the name that requests will use")
    load.add_argument("source", metavar="SOURCE", help="a name on the Hugging Face hub, or a path that the server allows")
    unload = _add(subcommands, "lora unload", "unload an adapter")
    unload.add_argument("name", metavar="NAME")


def _subcommands(parser: argparse.ArgumentParser) -> Commands[argparse.ArgumentParser]:
    return parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)


def _add(commands: Commands[argparse.ArgumentParser], command: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(command.split()[-1], help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_client_options(parser)

    def run(args: argparse.Namespace) -> int:
        from .calling import call
        from .control_calls import COMMANDS

        return call(args, COMMANDS[command])

    parser.set_defaults(run=run)
    return parser
