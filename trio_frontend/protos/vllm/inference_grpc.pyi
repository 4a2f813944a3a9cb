# Generated from vllm/inference.proto by tools/generate_protos.py. Do not edit.
from typing import Any

from trio_frontend.protos.vllm import inference_pb2
from trio_frontend.protos._typing import StreamStream, StreamUnary, UnaryStream, UnaryUnary

class InferenceServicer:
    def Generate(self, *args: Any, **kwargs: Any) -> Any: ...
    def GenerateStream(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def service(self) -> Any: ...

class InferenceStub:
    def __init__(self, channel: Any) -> None: ...
    Generate: UnaryUnary[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    GenerateStream: UnaryStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

class GenerateServicer:
    def Generate(self, *args: Any, **kwargs: Any) -> Any: ...
    def GenerateStream(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def service(self) -> Any: ...

class GenerateStub:
    def __init__(self, channel: Any) -> None: ...
    Generate: UnaryUnary[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
    GenerateStream: UnaryStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
