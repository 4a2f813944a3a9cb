"""python -m benchmarks.micro.inference: CPU of services.inference alone, in microseconds, without a network or an engine.

Per streamed token: what the engine's reader spends in the sink, until the message is handed to a call that takes it, for the usual
kinds of requests. Per unary request: checks, tokenizing, conversion, the scope of an engine that answers at once, and the message.
Per stage of a request. Each number is the best of several rounds, since what is shared is noisy. ``--profile`` prints where a unary
request's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import trio
from trio_util import AsyncValue

from tests.services.inference_rig import VOCAB_SIZE, model
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import (
    Capabilities,
    Engine,
    EngineHealth,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    FinishReason,
    OutputStream,
)
from trio_frontend.engine.outputs import RequestOutputs
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.delivery import Delivery, TokenMessages
from trio_frontend.services.inference import InferenceService

ROUNDS = 7
TOKENS = list(range(300, 440)) * 40


class Taker:
    """A call that takes every message."""

    metadata: ClassVar[dict[str, Any]] = {}

    def try_send_bytes(self, serialized: bytes) -> bool:
        return True

    async def send_bytes(self, serialized: bytes) -> None:
        await trio.lowlevel.checkpoint()


class InstantEngine(Engine):
    """Answers every request at once with as many tokens as it wants."""

    def __init__(self) -> None:
        self.health = AsyncValue(EngineHealth(EngineState.SERVING))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_model_len=100_000, engines=(EngineInfo(),))

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[OutputStream]:
        outputs = RequestOutputs(request.sampling.max_tokens)
        for position in range(1, request.sampling.max_tokens + 1):
            last = position == request.sampling.max_tokens
            outputs.put(EngineOutput([300], finish_reason=FinishReason.LENGTH if last else None))
        yield outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        raise NotImplementedError

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        raise NotImplementedError

    @property
    def live_requests(self) -> int:
        return 0


def best(work: Callable[[], Any], count: int) -> float:
    """Microseconds of CPU per unit, of ``count`` units that ``work`` does."""
    taken = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken) / count * 1e6


def message(max_new_tokens: int = 1, **fields: Any) -> pb.GenerateRequest:
    response = {"output_token_ids": True} | fields.pop("response", {})
    stopping = {"max_new_tokens": max_new_tokens} | fields.pop("stopping", {})
    return pb.GenerateRequest(text="import os\n", stopping=stopping, response=response, **fields)


KINDS: dict[str, tuple[str, pb.GenerateRequest]] = {
    "byte-level, text and ids": ("byte_level", message(99_000)),
    "byte-level, text": ("byte_level", message(99_000, response={"output_token_ids": False})),
    "byte-level, ids": ("byte_level", message(99_000, response={"output_text": False})),
    "byte-level, two stop strings": ("byte_level", message(99_000, stopping={"stop_strings": ["\n\n###", "</answer>"]})),
    "byte fallback, text and ids": ("llama_byte_fallback", message(99_000)),
    "metaspace, text and ids": ("metaspace", message(99_000)),
    "any other tokenizer, text and ids": ("word_piece", message(99_000)),
}


def per_token(family: str, request: pb.GenerateRequest) -> float:
    async def plan() -> Any:
        return await service._plan(request, Taker())

    service = InferenceService(InstantEngine(), model(family), ServerConfig())
    made = trio.run(plan)
    outputs = [EngineOutput([token_id]) for token_id in TOKENS]
    tables = TokenMessages()

    def work() -> None:
        delivery = Delivery(service._sequence(made, 0), Taker(), 1, tables.of(made.output, 0))
        sink = delivery._choose_sink()
        assert sink is not None
        for output in outputs:
            sink(output)

    work()
    return best(work, len(outputs))


def per_request(request: pb.GenerateRequest, stream: bool, count: int, profile: bool = False) -> float:
    service = InferenceService(InstantEngine(), model(), ServerConfig())
    call = Taker()
    handler = service.generate_stream if stream else service.generate

    async def work() -> None:
        for _ in range(count):
            answer = await handler(request, call)
            if answer is not None:
                answer.SerializeToString()

    trio.run(work)
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(trio.run, work)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return best(lambda: trio.run(work), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print("us per streamed token, in the engine's reader:")
    for name, (family, request) in KINDS.items():
        print(f"  {per_token(family, request):6.2f}  {name}")
    print("us per request:")
    print(f"  {per_request(message(1), False, 300, args.profile):6.1f}  unary, 1 token")
    print(f"  {per_request(message(128), False, 100):6.1f}  unary, 128 tokens")
    print(f"  {per_request(message(1), True, 300):6.1f}  stream, 1 token")
    schema = {"json": '{"type":"object","properties":{"a":{"type":"string"}}}'}
    print(f"  {per_request(message(1, decoding=schema), False, 300):6.1f}  unary, 1 token, a JSON schema seen before")
    long = message(1)
    long.token_ids.ids.extend([i % VOCAB_SIZE for i in range(20_000)])
    print(f"  {per_request(long, False, 30):6.1f}  unary, 1 token, a prompt of 20000 token ids")


if __name__ == "__main__":
    main()
