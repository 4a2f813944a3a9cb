"""A grpcio server for tests of our client: the peer that no one here wrote."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from trio_frontend.protos.vllm import inference_pb2


class Inference:
    """What a test can see of the calls: their metadata, deadlines and ends; and what the answers are.

    A prompt says what the answer is: ``echo``, ``fail``, ``hang``, ``large:BYTES``, ``none``, ``count:N``.
    """

    def __init__(self) -> None:
        self.metadata: list[dict[str, Any]] = []
        self.time_remaining: list[float | None] = []
        self.cancelled = threading.Event()
        self.started = threading.Event()
        self.go_on = threading.Event()

    def see(self, context: grpc.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_remaining.append(context.time_remaining())
        context.add_callback(self.cancelled.set)
        self.started.set()

    def generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.see(context)
        if request.text == "fail":
            context.set_trailing_metadata((("reason", "asked to"), ("reason-bin", b"\x00\xff")))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "cannot: 100% \u00e4")
        if request.text == "hang":
            self.go_on.wait(10)
        size = int(request.text.partition(":")[2]) if request.text.startswith("large:") else 0
        return inference_pb2.GenerateResponse(outputs={"text": "x" * size if size else request.text})

    def generate_stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.see(context)
        kind, _, number = request.text.partition(":")
        context.send_initial_metadata((("kind", kind),))
        if kind == "fail":
            yield inference_pb2.GenerateResponse(outputs={"text": "before"})
            context.abort(grpc.StatusCode.INTERNAL, "it broke")
        for index in range(int(number or 0)):
            yield inference_pb2.GenerateResponse(outputs={"index": index, "text": "x" * 1000})
        if kind == "hang":
            yield inference_pb2.GenerateResponse(outputs={"text": "one"})
            while context.is_active() and not self.go_on.is_set():
                time.sleep(0.005)


@contextmanager
def serve(
    inference: Inference | None = None,
    *,
    credentials: grpc.ServerCredentials | None = None,
    options: tuple[tuple[str, Any], ...] = (),
) -> Iterator[tuple[str, Inference, grpc.Server]]:
    """A server with ``vllm.Inference``, its address ``127.0.0.1:PORT``, and the server itself."""
    inference = inference or Inference()
    server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0), *options))
    coders = {
        "request_deserializer": inference_pb2.GenerateRequest.FromString,
        "response_serializer": inference_pb2.GenerateResponse.SerializeToString,
    }
    handlers = {
        "Generate": grpc.unary_unary_rpc_method_handler(inference.generate, **coders),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(inference.generate_stream, **coders),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("vllm.Inference", handlers),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}", inference, server
    finally:
        inference.go_on.set()
        server.stop(None).wait()
