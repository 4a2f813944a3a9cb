"""``trio-frontend generate``: a prompt in, text out as it streams."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .arguments import add_client_options, count, positive
from .errors import CommandError

if TYPE_CHECKING:
    from trio_frontend.client import Channel
    from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest

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
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="(default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on when the model says that it is done")
    parser.add_argument(
        "--n", type=positive, default=1, metavar="N", help="so many continuations; each printed when it ends"
    )
    add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.prompt == "-":
        args.prompt = sys.stdin.read()
    from .calling import call

    return call(args, _generate)


async def _generate(args: argparse.Namespace, channel: Channel) -> int:
    from trio_frontend.protos.vllm.inference_grpc import InferenceStub
    from trio_frontend.protos.vllm.inference_pb2 import FinishInfo

    waiting: dict[int, list[str]] = {}
    aborted = False
    async with channel.stream(InferenceStub(channel).GenerateStream, _request(args)) as responses:
        async for response in responses:
            if not response.HasField("outputs"):
                continue
            output = response.outputs
            aborted = aborted or output.finish_info.finish_reason == FinishInfo.ABORTED
            if args.n == 1:
                print(output.text, end="", flush=True)
                continue
            # Several texts at once would mix: each is printed when it is whole.
            waiting.setdefault(output.index, []).append(output.text)
            if output.HasField("finish_info"):
                print(f"[{output.index}] {''.join(waiting.pop(output.index))}", flush=True)
    if args.n == 1:
        print(flush=True)
    if aborted:
        raise CommandError("the request was aborted")
    return 0


def _request(args: argparse.Namespace) -> GenerateRequest:
    from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, RandomSampling, StoppingCriteria

    return GenerateRequest(
        model=args.model,
        text=args.prompt,
        temperature=args.temperature,
        sampling=RandomSampling(
            num_sequences=args.n if args.n > 1 else 0, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed
        ),
        stopping=StoppingCriteria(
            max_new_tokens=args.max_tokens,
            min_new_tokens=args.min_tokens,
            stop_strings=args.stop,
            ignore_eos=args.ignore_eos,
        ),
    )
