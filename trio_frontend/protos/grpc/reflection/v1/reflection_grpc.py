# Generated from grpc/reflection/v1/reflection.proto by tools/generate_protos.py. Do not edit.
import purerpc
import trio_frontend.protos.grpc.reflection.v1.reflection_pb2 as trio_frontend_dot_protos_dot_grpc_dot_reflection_dot_v1_dot_reflection__pb2


class ServerReflectionServicer(purerpc.Servicer):
    async def ServerReflectionInfo(self, input_messages):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "grpc.reflection.v1.ServerReflection"
        )
        service_obj.add_method(
            "ServerReflectionInfo",
            self.ServerReflectionInfo,
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                trio_frontend_dot_protos_dot_grpc_dot_reflection_dot_v1_dot_reflection__pb2.ServerReflectionRequest,
                trio_frontend_dot_protos_dot_grpc_dot_reflection_dot_v1_dot_reflection__pb2.ServerReflectionResponse,
            )
        )
        return service_obj


class ServerReflectionStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "grpc.reflection.v1.ServerReflection",
            channel
        )
        self.ServerReflectionInfo = self._client.get_method_stub(
            "ServerReflectionInfo",
            purerpc.RPCSignature(
                purerpc.Cardinality.STREAM_STREAM,
                trio_frontend_dot_protos_dot_grpc_dot_reflection_dot_v1_dot_reflection__pb2.ServerReflectionRequest,
                trio_frontend_dot_protos_dot_grpc_dot_reflection_dot_v1_dot_reflection__pb2.ServerReflectionResponse,
            )
        )
