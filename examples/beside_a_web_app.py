"""One process, one Trio nursery: a web app (Quart-Trio under Hypercorn) and vLLM's gRPC API, over the same engine.

    pip install "hypercorn<0.18" quart-trio
    python examples/beside_a_web_app.py
    curl "http://127.0.0.1:8000/generate?prompt=Once+upon+a+time"

Ctrl-C ends both, in order. docs/embedding.md says which versions of Hypercorn go with purerpc's pin of h2, and why.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as serve_web
from quart import Response, request
from quart_trio import QuartTrio

import trio_frontend
from trio_frontend.client import Channel, connect
from trio_frontend.engine import embedded
from trio_frontend.protos.vllm.inference_grpc import InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, StoppingCriteria


def web_app(channel: Channel) -> QuartTrio:
    app = QuartTrio(__name__)
    stub = InferenceStub(channel)

    @app.get("/generate")
    async def generate() -> Response:
        message = GenerateRequest(
            text=request.args.get("prompt", "Once upon a time"), stopping=StoppingCriteria(max_new_tokens=40)
        )

        async def text() -> AsyncIterator[bytes]:
            # A browser that leaves closes this generator, and with it the request in the engine.
            async with channel.stream(stub.GenerateStream, message) as responses:
                async for response in responses:
                    yield response.outputs.text.encode()

        return Response(text(), mimetype="text/plain")

    return app


async def main(web_port: int = 8000, grpc_port: int = 50051) -> None:
    web = Config()
    web.bind = [f"127.0.0.1:{web_port}"]
    async with trio_frontend.running(embedded.open_engine, trio_frontend.ServerConfig(port=grpc_port)) as server:
        host, port = server.addresses[0]
        async with connect(f"{host}:{port}") as channel:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                print(f"gRPC on {host}:{port}, web on http://{web.bind[0]}", flush=True)
                await serve_web(web_app(channel), web, shutdown_trigger=partial(anext, signals))
    # Hypercorn is done with its requests; leaving the block has let our calls finish, and closed the engine.


if __name__ == "__main__":
    trio.run(main)
