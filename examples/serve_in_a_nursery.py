"""A Trio app of your own that serves vLLM's gRPC API in its nursery, talks to it, and ends it.

python examples/serve_in_a_nursery.py
"""

from __future__ import annotations

import trio

import trio_frontend
from trio_frontend.client import connect
from trio_frontend.engine import embedded
from trio_frontend.protos.vllm.inference_grpc import InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, StoppingCriteria


async def main() -> None:
    async with trio.open_nursery() as nursery:
        # Port 0: the system chooses one. Returns once the engine serves.
        config = trio_frontend.ServerConfig(port=0)
        server = await nursery.start(trio_frontend.serve, embedded.open_engine, config)
        host, port = server.addresses[0]
        print(f"serving on {host}:{port}")

        async with connect(f"{host}:{port}") as channel:
            stub = InferenceStub(channel)
            request = GenerateRequest(text="Once upon a time", stopping=StoppingCriteria(max_new_tokens=40))
            # Any cancel scope ends the request in the engine: a timeout here, a cancelled nursery, leaving the block.
            with trio.move_on_after(10):
                async with channel.stream(stub.GenerateStream, request) as responses:
                    async for response in responses:
                        print(response.outputs.text, end="", flush=True)
        print()

        # In order: calls in flight may finish. Cancelling the nursery would not wait for them.
        await server.shutdown()


if __name__ == "__main__":
    trio.run(main)
