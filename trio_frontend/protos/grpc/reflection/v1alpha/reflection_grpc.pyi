# Generated from grpc/reflection/v1alpha/reflection.proto by tools/generate_protos.py. Do not edit.
from typing import Any

from trio_frontend.protos.grpc.reflection.v1alpha import reflection_pb2
from trio_frontend.protos._typing import StreamStream, StreamUnary, UnaryStream, UnaryUnary

class ServerReflectionServicer:
    def ServerReflectionInfo(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def service(self) -> Any: ...

class ServerReflectionStub:
    def __init__(self, channel: Any) -> None: ...
    ServerReflectionInfo: StreamStream[reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse]
