"""purerpc's own server answering GenerateStream and Generate with constant messages: what its loop alone costs.

    python -m benchmarks.peers.purerpc_server PORT

No engine, no tokenizer: a lower bound for anything built on that loop.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import purerpc

from trio_frontend.protos.vllm import inference_grpc, inference_pb2

TOKEN = inference_pb2.GenerateResponse(outputs=inference_pb2.SequenceOutput(text=" word", num_tokens=1, token_ids=[300]))


class Inference(inference_grpc.InferenceServicer):
    async def Generate(self, input_message: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
        n = input_message.stopping.max_new_tokens
        outputs = inference_pb2.SequenceOutput(text=" word" * n, num_tokens=n, token_ids=[300] * n)
        return inference_pb2.GenerateResponse(outputs=outputs)

    async def GenerateStream(
        self, input_message: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for _ in range(input_message.stopping.max_new_tokens):
            yield TOKEN


def main() -> None:
    server = purerpc.Server(int(sys.argv[1]))
    server.add_service(Inference().service)
    server.serve(backend="trio")


if __name__ == "__main__":
    main()
