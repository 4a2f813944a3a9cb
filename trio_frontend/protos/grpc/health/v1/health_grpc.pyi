# Generated from grpc/health/v1/health.proto by tools/generate_protos.py. Do not edit.
from typing import Any

from trio_frontend.protos.grpc.health.v1 import health_pb2
from trio_frontend.protos._typing import StreamStream, StreamUnary, UnaryStream, UnaryUnary

class HealthServicer:
    def Check(self, *args: Any, **kwargs: Any) -> Any: ...
    def List(self, *args: Any, **kwargs: Any) -> Any: ...
    def Watch(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def service(self) -> Any: ...

class HealthStub:
    def __init__(self, channel: Any) -> None: ...
    Check: UnaryUnary[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    List: UnaryUnary[health_pb2.HealthListRequest, health_pb2.HealthListResponse]
    Watch: UnaryStream[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
