# Generated from vllm/inference.proto by tools/generate_protos.py. Do not edit.
import purerpc
import trio_frontend.protos.vllm.inference_pb2 as trio_frontend_dot_protos_dot_vllm_dot_inference__pb2


class InferenceServicer(purerpc.Servicer):
    async def Generate(self, input_message):
        raise NotImplementedError()

    async def GenerateStream(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "vllm.Inference"
        )
        service_obj.add_method(
            "Generate",
            self.Generate,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        service_obj.add_method(
            "GenerateStream",
            self.GenerateStream,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        return service_obj


class InferenceStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "vllm.Inference",
            channel
        )
        self.Generate = self._client.get_method_stub(
            "Generate",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        self.GenerateStream = self._client.get_method_stub(
            "GenerateStream",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )


class GenerateServicer(purerpc.Servicer):
    async def Generate(self, input_message):
        raise NotImplementedError()

    async def GenerateStream(self, input_message):
        raise NotImplementedError()

    @property
    def service(self) -> purerpc.Service:
        service_obj = purerpc.Service(
            "vllm.Generate"
        )
        service_obj.add_method(
            "Generate",
            self.Generate,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        service_obj.add_method(
            "GenerateStream",
            self.GenerateStream,
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        return service_obj


class GenerateStub:
    def __init__(self, channel):
        self._client = purerpc.Client(
            "vllm.Generate",
            channel
        )
        self.Generate = self._client.get_method_stub(
            "Generate",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_UNARY,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
        self.GenerateStream = self._client.get_method_stub(
            "GenerateStream",
            purerpc.RPCSignature(
                purerpc.Cardinality.UNARY_STREAM,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateRequest,
                trio_frontend_dot_protos_dot_vllm_dot_inference__pb2.GenerateResponse,
            )
        )
