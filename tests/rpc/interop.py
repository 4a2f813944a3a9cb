"""The gRPC project's interop test service (grpc.testing.TestService), as a purerpc service; its messages in a pool of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import purerpc
import trio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from purerpc import Cardinality, RPCSignature

from trio_frontend import rpc

_FIELDS: dict[str, list[tuple[str, int, str]]] = {
    "Empty": [],
    "BoolValue": [("value", 1, "bool")],
    "Payload": [("type", 1, "int32"), ("body", 2, "bytes")],
    "EchoStatus": [("code", 1, "int32"), ("message", 2, "string")],
    "SimpleRequest": [
        ("response_size", 2, "int32"),
        ("payload", 3, "Payload"),
        ("response_compressed", 6, "BoolValue"),
        ("response_status", 7, "EchoStatus"),
        ("expect_compressed", 8, "BoolValue"),
    ],
    "SimpleResponse": [("payload", 1, "Payload")],
    "StreamingInputCallRequest": [("payload", 1, "Payload"), ("expect_compressed", 2, "BoolValue")],
    "StreamingInputCallResponse": [("aggregated_payload_size", 1, "int32")],
    "ResponseParameters": [("size", 1, "int32"), ("interval_us", 2, "int32"), ("compressed", 3, "BoolValue")],
    "StreamingOutputCallRequest": [
        ("response_parameters", 2, "repeated ResponseParameters"),
        ("payload", 3, "Payload"),
        ("response_status", 7, "EchoStatus"),
    ],
    "StreamingOutputCallResponse": [("payload", 1, "Payload")],
}


def _messages() -> dict[str, Any]:
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {name: getattr(field_type, f"TYPE_{name.upper()}") for name in ("bool", "int32", "bytes", "string")}
    file = descriptor_pb2.FileDescriptorProto(name="interop.proto", package="grpc.testing", syntax="proto3")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            repeated, _, kind = kind.rpartition(" ")
            label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            if kind in scalars:
                described.field.add(name=name, number=number, label=label, type=scalars[kind])
            else:
                type_name = f".grpc.testing.{kind}"
                described.field.add(name=name, number=number, label=label, type=field_type.TYPE_MESSAGE, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.testing.{name}")) for name in _FIELDS}


MESSAGES = _messages()
Empty = MESSAGES["Empty"]
SimpleRequest, SimpleResponse = MESSAGES["SimpleRequest"], MESSAGES["SimpleResponse"]
InputRequest, InputResponse = MESSAGES["StreamingInputCallRequest"], MESSAGES["StreamingInputCallResponse"]
OutputRequest, OutputResponse = MESSAGES["StreamingOutputCallRequest"], MESSAGES["StreamingOutputCallResponse"]

METHODS = {
    "EmptyCall": (Cardinality.UNARY_UNARY, Empty, Empty),
    "UnaryCall": (Cardinality.UNARY_UNARY, SimpleRequest, SimpleResponse),
    "StreamingOutputCall": (Cardinality.UNARY_STREAM, OutputRequest, OutputResponse),
    "StreamingInputCall": (Cardinality.STREAM_UNARY, InputRequest, InputResponse),
    "FullDuplexCall": (Cardinality.STREAM_STREAM, OutputRequest, OutputResponse),
}


def _check_compression(message: Any, call: rpc.Call) -> None:
    if message.HasField("expect_compressed") and message.expect_compressed.value != call.received_compressed:
        raise rpc.StatusError(rpc.StatusCode.INVALID_ARGUMENT, "compression is not as expected")


def _check_status(message: Any) -> None:
    if message.HasField("response_status"):
        status = message.response_status
        raise rpc.StatusError(rpc.StatusCode(status.code), status.message)


async def _echo_metadata(call: rpc.Call) -> None:
    trailing = call.metadata.get("x-grpc-test-echo-trailing-bin")
    if trailing is not None:
        call.set_trailing_metadata({"x-grpc-test-echo-trailing-bin": trailing})
    initial = call.metadata.get("x-grpc-test-echo-initial")
    if initial is not None:
        await call.send_initial_metadata({"x-grpc-test-echo-initial": initial})


class TestService:
    """What a server of the interop suite does; ``cancelled`` counts the calls that were."""

    __test__ = False

    def __init__(self) -> None:
        self.cancelled = 0

    async def EmptyCall(self, message: Any) -> Any:
        return Empty()

    async def UnaryCall(self, message: Any, request: rpc.Call) -> Any:
        _check_compression(message, request)
        if message.response_compressed.value:
            request.use_gzip()
        await _echo_metadata(request)
        _check_status(message)
        return SimpleResponse(payload={"body": bytes(message.response_size)})

    async def StreamingOutputCall(self, message: Any, request: rpc.Call) -> None:
        request.use_gzip()
        await self._answer(message, request)

    async def StreamingInputCall(self, messages: AsyncIterator[Any], request: rpc.Call) -> Any:
        size = 0
        try:
            async for message in messages:
                _check_compression(message, request)
                size += len(message.payload.body)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        return InputResponse(aggregated_payload_size=size)

    async def FullDuplexCall(self, messages: AsyncIterator[Any], request: rpc.Call) -> None:
        try:
            await _echo_metadata(request)
            async for message in messages:
                _check_status(message)
                await self._answer(message, request)
        except trio.Cancelled:
            self.cancelled += 1
            raise

    async def _answer(self, message: Any, request: rpc.Call) -> None:
        for parameters in message.response_parameters:
            await trio.sleep(parameters.interval_us / 1e6)
            request.compress = parameters.compressed.value
            await request.send(OutputResponse(payload={"body": bytes(parameters.size)}))

    @property
    def service(self) -> purerpc.Service:
        made = purerpc.Service("grpc.testing.TestService")
        for name, (cardinality, request_type, response_type) in METHODS.items():
            made.add_method(name, getattr(self, name), RPCSignature(cardinality, request_type, response_type))
        return made
