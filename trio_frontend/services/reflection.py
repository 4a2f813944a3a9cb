"""Server reflection, ``grpc.reflection.v1`` and ``v1alpha``: a client that has no .proto files can list, describe and call.

The descriptors are those of this package's own pool (:data:`trio_frontend.protos.POOL`). A file is answered with all that it
imports, each file once, as clients build their own pool of it. v1alpha is v1 under its earlier name: one class serves both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import purerpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from trio_frontend.protos import POOL
from trio_frontend.protos.grpc.reflection.v1 import reflection_grpc as v1_grpc
from trio_frontend.protos.grpc.reflection.v1 import reflection_pb2 as v1
from trio_frontend.protos.grpc.reflection.v1alpha import reflection_grpc as v1alpha_grpc
from trio_frontend.protos.grpc.reflection.v1alpha import reflection_pb2 as v1alpha
from trio_frontend.rpc.status import StatusCode

__all__ = ["REFLECTION_SERVICES", "reflection_services"]

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def reflection_services(service_names: Iterable[str]) -> list[purerpc.Service]:
    """Both reflection services of a server that has the services ``service_names`` and these two."""
    names = sorted({*service_names, *REFLECTION_SERVICES})
    return [_ReflectionV1(names, v1).service, _ReflectionV1Alpha(names, v1alpha).service]


class _Outgoing(Protocol):
    """What an answer needs of its call."""

    async def send(self, message: Any) -> None: ...


class _NotFoundError(Exception):
    """What was asked for is not in the pool; the message says what."""


class _Reflection:
    """The method of both protocols; ``messages`` is the module of one's messages."""

    def __init__(self, service_names: list[str], messages: Any) -> None:
        self._service_names = service_names
        self._messages = messages

    async def ServerReflectionInfo(self, input_messages: AsyncIterator[Any], request: _Outgoing) -> None:
        async for message in input_messages:
            await request.send(self._answer(message))

    def _answer(self, request: Any) -> Any:
        kind = request.WhichOneof("message_request")
        response = self._messages.ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            if kind == "list_services":
                response.list_services_response.service.extend(
                    self._messages.ServiceResponse(name=name) for name in self._service_names
                )
            elif kind == "file_by_filename":
                response.file_descriptor_response.file_descriptor_proto.extend(
                    _with_imports(_file(request.file_by_filename))
                )
            elif kind == "file_containing_symbol":
                file = _file_of_symbol(POOL, request.file_containing_symbol)
                response.file_descriptor_response.file_descriptor_proto.extend(_with_imports(file))
            elif kind == "file_containing_extension":
                # proto3 messages have no extensions
                extension = request.file_containing_extension
                raise _NotFoundError(f"extension {extension.extension_number} of {extension.containing_type}")
            elif kind == "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                _message_type(name)
                response.all_extension_numbers_response.base_type_name = name
            else:
                response.error_response.error_code = StatusCode.INVALID_ARGUMENT.value
                response.error_response.error_message = "message_request: nothing was asked"
        except _NotFoundError as error:
            response.error_response.error_code = StatusCode.NOT_FOUND.value
            response.error_response.error_message = f"not found: {error}"
        return response


class _ReflectionV1(_Reflection, v1_grpc.ServerReflectionServicer):
    pass


class _ReflectionV1Alpha(_Reflection, v1alpha_grpc.ServerReflectionServicer):
    pass


def _file(name: str) -> FileDescriptor:
    try:
        return POOL.FindFileByName(name)
    except KeyError:
        raise _NotFoundError(f"file {name!r}") from None


def _message_type(name: str) -> None:
    try:
        POOL.FindMessageTypeByName(name)
    except KeyError:
        raise _NotFoundError(f"message {name!r}") from None


def _file_of_symbol(pool: DescriptorPool, symbol: str) -> FileDescriptor:
    """The file of a message, enum, service, or of a field, oneof, enum value or method of one (pools find only the former)."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        pass
    parent, _, member = symbol.rpartition(".")
    for find, members in (
        (pool.FindServiceByName, ("methods_by_name",)),
        (pool.FindMessageTypeByName, ("fields_by_name", "oneofs_by_name", "enum_values_by_name")),
        (pool.FindEnumTypeByName, ("values_by_name",)),
    ):
        try:
            descriptor: Any = find(parent)
        except KeyError:
            continue
        if any(member in getattr(descriptor, kind) for kind in members):
            file: FileDescriptor = descriptor.file
            return file
    raise _NotFoundError(f"symbol {symbol!r}")


def _with_imports(file: FileDescriptor) -> list[bytes]:
    """``file`` and what it imports, serialized, each once, ``file`` first."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        descriptor = waiting.pop()
        if descriptor.name not in found:
            found[descriptor.name] = descriptor.serialized_pb
            waiting.extend(descriptor.dependencies)
    return list(found.values())
