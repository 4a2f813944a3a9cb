"""Protects clients without .proto files: they list, describe and call what the server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest
import trio
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from trio_frontend import rpc
from trio_frontend.protos.grpc.health.v1.health_grpc import HealthServicer
from trio_frontend.protos.grpc.reflection.v1 import reflection_pb2 as v1
from trio_frontend.protos.grpc.reflection.v1alpha import reflection_pb2 as v1alpha
from trio_frontend.protos.vllm import control_pb2, inference_pb2
from trio_frontend.protos.vllm.inference_grpc import InferenceServicer
from trio_frontend.services.reflection import reflection_services

Result = TypeVar("Result")
NAMES = ["grpc.health.v1.Health", "vllm.Control", "vllm.Generate", "vllm.Inference"]
ALL_NAMES = sorted([*NAMES, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"])
assert control_pb2.DESCRIPTOR  # what a server serves it has imported


class Echo(InferenceServicer):
    async def Generate(self, input_message: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(outputs={"text": input_message.text.upper()})


@pytest.fixture
async def address(nursery: trio.Nursery) -> str:
    services = [Echo().service, HealthServicer().service, *reflection_services(NAMES)]
    ((host, port),) = await nursery.start(rpc.serve, services)
    return f"{host}:{port}"


async def with_channel(address: str, function: Callable[[grpc.Channel], Result]) -> Result:
    def run() -> Result:
        with grpc.insecure_channel(address) as channel:
            return function(channel)

    with trio.fail_after(20):
        return await trio.to_thread.run_sync(run)


async def test_grpcio_lists_describes_and_calls_without_proto_files(address: str) -> None:
    def explore(channel: grpc.Channel) -> tuple[list[str], list[str], str]:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("vllm.Inference")
        method = service.methods_by_name["Generate"]
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            f"/{service.full_name}/{method.name}", request_type.SerializeToString, response_type.FromString
        )
        answer: Any = call(request_type(text="hello", kv={"kv_transfer_params": {"a": 1}}))
        fields = [field.name for field in request_type.DESCRIPTOR.fields]
        return list(database.get_services()), fields, answer.outputs.text

    names, fields, text = await with_channel(address, explore)
    assert sorted(names) == ALL_NAMES
    assert fields == [field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields]
    assert text == "HELLO"


PATHS = {
    v1: "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    v1alpha: "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}


async def ask(address: str, messages: Any, **question: Any) -> Any:
    (answer,) = await ask_all(address, messages, [question])
    return answer


async def ask_all(address: str, messages: Any, questions: list[dict[str, Any]]) -> list[Any]:
    def stream(channel: grpc.Channel) -> list[Any]:
        call = channel.stream_stream(
            PATHS[messages],
            messages.ServerReflectionRequest.SerializeToString,
            messages.ServerReflectionResponse.FromString,
        )
        return list(call(iter([messages.ServerReflectionRequest(**question) for question in questions]), timeout=10))

    return await with_channel(address, stream)


@pytest.mark.parametrize("messages", [v1, v1alpha], ids=["v1", "v1alpha"])
async def test_both_protocols_answer_each_request_of_a_stream_in_order(address: str, messages: Any) -> None:
    questions = [{"host": str(i), "file_by_filename": "vllm/control.proto"} for i in range(20)]
    answers = await ask_all(address, messages, [*questions, {"list_services": ""}])
    assert [answer.valid_host for answer in answers] == [*(str(i) for i in range(20)), ""]
    assert [service.name for service in answers[-1].list_services_response.service] == ALL_NAMES
    assert answers[3].original_request == messages.ServerReflectionRequest(**questions[3])


async def test_a_file_comes_with_all_that_it_imports_each_once(address: str) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    answer = await ask(address, v1, file_by_filename="vllm/inference.proto")
    files = [FileDescriptorProto.FromString(f).name for f in answer.file_descriptor_response.file_descriptor_proto]
    assert files == ["vllm/inference.proto", "google/protobuf/struct.proto"]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("vllm.Inference", "vllm/inference.proto"),
        ("vllm.Inference.GenerateStream", "vllm/inference.proto"),
        ("vllm.GenerateRequest", "vllm/inference.proto"),
        ("vllm.GenerateRequest.text", "vllm/inference.proto"),
        ("vllm.GenerateRequest.prompt", "vllm/inference.proto"),
        ("vllm.FinishInfo.FinishReason", "vllm/inference.proto"),
        ("vllm.FinishInfo.LENGTH", "vllm/inference.proto"),
        ("vllm.DecodingParameters.StringChoices.choices", "vllm/inference.proto"),
        ("vllm.MODALITY_IMAGE", "vllm/inference.proto"),
        ("vllm.Control.Abort", "vllm/control.proto"),
        ("google.protobuf.Value", "google/protobuf/struct.proto"),
        ("grpc.health.v1.Health", "grpc/health/v1/health.proto"),
    ],
)
async def test_a_symbol_is_found_in_its_file(address: str, symbol: str, file: str) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    answer = await ask(address, v1, file_containing_symbol=symbol)
    assert FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0]).name == file


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"file_by_filename": "nope.proto"}, "file 'nope.proto'"),
        ({"file_containing_symbol": "vllm.Nope"}, "symbol 'vllm.Nope'"),
        ({"file_containing_symbol": "vllm.Inference.Nope"}, "symbol 'vllm.Inference.Nope'"),
        ({"file_containing_symbol": ""}, "symbol ''"),
        ({"all_extension_numbers_of_type": "vllm.Nope"}, "message 'vllm.Nope'"),
        (
            {"file_containing_extension": {"containing_type": "vllm.GenerateRequest", "extension_number": 7}},
            "extension 7 of",
        ),
    ],
)
async def test_what_is_not_there_is_not_found_and_named(address: str, question: dict[str, Any], said: str) -> None:
    answer = await ask(address, v1, **question)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert said in answer.error_response.error_message


async def test_a_request_that_asks_nothing_is_an_invalid_argument(address: str) -> None:
    answer = await ask(address, v1, host="h")
    assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_a_message_has_no_extensions(address: str) -> None:
    answer = await ask(address, v1, all_extension_numbers_of_type="vllm.GenerateRequest")
    assert answer.all_extension_numbers_response.base_type_name == "vllm.GenerateRequest"
    assert list(answer.all_extension_numbers_response.extension_number) == []


def test_each_protocol_is_a_service_of_its_own() -> None:
    assert [service.name for service in reflection_services([])] == sorted(
        ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]
    )
