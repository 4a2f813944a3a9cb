# Generated from grpc/health/v1/health.proto by tools/generate_protos.py. Do not edit.
import purerpc
import trio_frontend.protos.grpc.health.v1.health_pb2 as trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2


class HealthServicer(purerpc.Servicer):
    async def Check(self, input_message):
        raise NotImplementedError()

    async def List(self, input_message):
        raise NotImplementedError()

    async def Watch(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "grpc.health.v1.Health"
        )
        service_obj.add_method(
            "Check",
            self.Check,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckResponse,
            )
        )
        service_obj.add_method(
            "List",
            self.List,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthListRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthListResponse,
            )
        )
        service_obj.add_method(
            "Watch",
            self.Watch,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckResponse,
            )
        )
        return service_obj


class HealthStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "grpc.health.v1.Health",
            channel
        )
        self.Check = self._client.get_method_stub(
            "Check",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckResponse,
            )
        )
        self.List = self._client.get_method_stub(
            "List",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthListRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthListResponse,
            )
        )
        self.Watch = self._client.get_method_stub(
            "Watch",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckRequest,
                trio_frontend_dot_protos_dot_grpc_dot_health_dot_v1_dot_health__pb2.HealthCheckResponse,
            )
        )
