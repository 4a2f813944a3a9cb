#!/usr/bin/env python3
"""A protoc plugin: ``*_pb2.py`` in a descriptor pool of our own, ``*_grpc.py`` by purerpc's generator, ``*_grpc.pyi``.

purerpc's own plugin does not declare that proto3 ``optional`` is fine with it (the services do not care), so protoc refuses
files that use it. This one declares it. It reads a CodeGeneratorRequest from stdin and writes a CodeGeneratorResponse
to stdout, as protoc asks of plugins; ``generate_protos.py`` runs it.
"""

from __future__ import annotations

import sys
from pathlib import PurePosixPath

from google.protobuf.compiler.plugin_pb2 import CodeGeneratorRequest, CodeGeneratorResponse
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, ServiceDescriptorProto
from purerpc.protoc_plugin.plugin import generate_single_proto

PACKAGE = "trio_frontend.protos"
PREFIX = PACKAGE.replace(".", "/") + "/"
HEADER = "# Generated from {proto} by tools/generate_protos.py. Do not edit.\n"

MESSAGES = '''{header}"""Messages of the package ``{package}``."""
{imports}
from {root}._pool import build as _build

DESCRIPTOR = _build(
{serialized}
    __name__,
    globals(),
)
'''


def module(proto: str) -> str:
    """The Python module of a .proto file's messages: ``vllm/control.proto`` -> ``trio_frontend.protos.vllm.control_pb2``."""
    return f"{PACKAGE}.{proto.removesuffix('.proto').replace('/', '.')}_pb2"


def drop_json_names(message: DescriptorProto) -> None:
    """Remove what protoc adds to a plugin's input and any reader can derive from the field's name."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        drop_json_names(nested)


def messages_module(file: FileDescriptorProto) -> str:
    bare = FileDescriptorProto()
    bare.CopyFrom(file)
    bare.ClearField("source_code_info")
    for message in bare.message_type:
        drop_json_names(message)
    serialized = bare.SerializeToString(deterministic=True)
    lines = [repr(serialized[i : i + 80]) for i in range(0, len(serialized), 80)]
    lines[-1] += ","
    imports = "".join(f"\nimport {module(name)}" for name in file.dependency)
    return MESSAGES.format(
        header=HEADER.format(proto=file.name),
        package=file.package,
        imports=imports + "\n" if imports else "",
        root=PACKAGE,
        serialized="\n".join("    " + line for line in lines),
    )


def services_module(file: FileDescriptorProto, proto_of: dict[str, str]) -> str:
    """purerpc's servicers and stubs. Its imports follow file names, so it is shown the files under our package's path."""
    moved = FileDescriptorProto()
    moved.CopyFrom(file)
    moved.name = PREFIX + file.name
    # only the messages' own modules are needed
    del moved.dependency[:]
    source = generate_single_proto(moved, {entity: PREFIX + proto for entity, proto in proto_of.items()})
    return HEADER.format(proto=file.name) + source.strip() + "\n"


def services_types(file: FileDescriptorProto, proto_of: dict[str, str]) -> str:
    methods = [method for service in file.service for method in service.method]
    modules = sorted({proto_of[t] for method in methods for t in (method.input_type, method.output_type)})
    imports = [
        f"from {PACKAGE}.{PurePosixPath(proto).parent.as_posix().replace('/', '.')} import {PurePosixPath(proto).stem}_pb2"
        for proto in modules
    ]
    parts = [HEADER.format(proto=file.name), "from typing import Any\n\n", *(line + "\n" for line in imports)]
    parts.append(f"from {PACKAGE}._typing import StreamStream, StreamUnary, UnaryStream, UnaryUnary\n")
    parts += [service_types(service, proto_of) for service in file.service]
    return "".join(parts)


def service_types(service: ServiceDescriptorProto, proto_of: dict[str, str]) -> str:
    def python_type(name: str) -> str:
        return f"{PurePosixPath(proto_of[name]).stem}_pb2.{name.rpartition('.')[2]}"

    servicer = [f"\nclass {service.name}Servicer:"]
    stub = [f"\nclass {service.name}Stub:", "    def __init__(self, channel: Any) -> None: ..."]
    for method in service.method:
        cardinality = ("Stream" if method.client_streaming else "Unary") + ("Stream" if method.server_streaming else "Unary")
        types = f"[{python_type(method.input_type)}, {python_type(method.output_type)}]"
        servicer.append(f"    def {method.name}(self, *args: Any, **kwargs: Any) -> Any: ...")
        stub.append(f"    {method.name}: {cardinality}{types}")
    servicer += ["    @property", "    def service(self) -> Any: ..."]
    return "\n".join(servicer + stub) + "\n"


def generate(request: CodeGeneratorRequest) -> CodeGeneratorResponse:
    response = CodeGeneratorResponse(supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)
    proto_of = {f".{file.package}.{m.name}": file.name for file in request.proto_file for m in file.message_type}
    for file in request.proto_file:
        if file.name not in request.file_to_generate:
            continue
        stem = file.name.removesuffix(".proto")
        response.file.add(name=f"{stem}_pb2.py", content=messages_module(file))
        if file.service:
            response.file.add(name=f"{stem}_grpc.py", content=services_module(file, proto_of))
            response.file.add(name=f"{stem}_grpc.pyi", content=services_types(file, proto_of))
    return response


if __name__ == "__main__":
    sys.stdout.buffer.write(generate(CodeGeneratorRequest.FromString(sys.stdin.buffer.read())).SerializeToString())
