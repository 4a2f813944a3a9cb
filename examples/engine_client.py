"""A Trio client of a vLLM engine, without a server and without vLLM: tokens in, tokens out, over ZeroMQ.

Start an engine, on this machine or another one, and this program with the same address; which comes first does not matter:

    vllm serve MODEL --headless --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 5570 --data-parallel-size-local 1
    python examples/engine_client.py tcp://127.0.0.1:5570

(``python benchmarks/mock_engine.py --handshake tcp://127.0.0.1:5570 --step-ms 20`` is an engine without a model.)
"""

from __future__ import annotations

import sys
import uuid

import trio

import trio_frontend
from trio_frontend import EngineRequest, FinishReason, SamplingParams


async def generate(engine: trio_frontend.Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    """One request is one task, and its scope: leaving it, in whatever way, tells the engine to stop."""
    request = EngineRequest(uuid.uuid4().hex, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    try:
        async with engine.generate(request) as outputs:
            async for batch in outputs:  # all that came since we looked last
                for output in batch:
                    print(f"{name}: {list(output.token_ids)}")
                    if output.finish_reason is FinishReason.LENGTH:
                        print(f"{name}: that were {max_tokens} tokens")
    except trio_frontend.EngineError as error:
        print(f"{name}: {error}")  # what was delivered before stays delivered


async def main(handshake_address: str) -> None:
    # Returns when the engine serves; until then it logs what it waits for. Leaving the block lets the engine go.
    async with trio_frontend.open_engine(handshake_address=handshake_address) as engine:
        print("max_model_len:", engine.capabilities.max_model_len)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(generate, engine, f"request {number}", [1, 2, 3 + number], 5)

        with trio.move_on_after(0.2):  # a deadline is a cancel scope like any other
            await generate(engine, "cut off", [1, 2, 3], engine.capabilities.max_model_len - 3)
        print("live requests:", engine.live_requests)

        print("is it asleep?", await engine.call_utility("is_sleeping"))
        print("health:", engine.health.value.state.name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    trio.run(main, sys.argv[1])
