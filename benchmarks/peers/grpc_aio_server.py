"""grpc.aio answering GenerateStream and Generate with constant messages: what grpcio's asyncio server alone costs.

    python -m benchmarks.peers.grpc_aio_server PORT

No engine, no tokenizer: a lower bound for anything built on it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from trio_frontend.protos.vllm import inference_pb2 as pb

TOKEN = pb.GenerateResponse(outputs=pb.SequenceOutput(text=" word", num_tokens=1, token_ids=[300]))


async def generate(message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
    n = message.stopping.max_new_tokens
    return pb.GenerateResponse(outputs=pb.SequenceOutput(text=" word" * n, num_tokens=n, token_ids=[300] * n))


async def generate_stream(
    message: pb.GenerateRequest, context: grpc.aio.ServicerContext
) -> AsyncIterator[pb.GenerateResponse]:
    for _ in range(message.stopping.max_new_tokens):
        yield TOKEN


async def main() -> None:
    server = grpc.aio.server()
    codecs = {
        "request_deserializer": pb.GenerateRequest.FromString,
        "response_serializer": pb.GenerateResponse.SerializeToString,
    }
    handlers = {
        "Generate": grpc.unary_unary_rpc_method_handler(generate, **codecs),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(generate_stream, **codecs),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vllm.Inference", handlers),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
