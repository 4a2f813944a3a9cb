"""Protects the wire contract: our messages and services are those that existing clients were generated from."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from google.protobuf import struct_pb2 as default_struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2 as upstream_health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as upstream_reflection_pb2

from tests.protos.upstream import UPSTREAM, compile_protos
from trio_frontend.protos import POOL
from trio_frontend.protos.google.protobuf import struct_pb2
from trio_frontend.protos.grpc.health.v1 import health_pb2
from trio_frontend.protos.grpc.reflection.v1 import reflection_pb2 as reflection_v1_pb2
from trio_frontend.protos.grpc.reflection.v1alpha import reflection_pb2 as reflection_v1alpha_pb2
from trio_frontend.protos.vllm import control_pb2, inference_pb2

ROOT = Path(__file__).resolve().parent.parent.parent
PROTOS = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))


def wire_form(file: FileDescriptorProto) -> FileDescriptorProto:
    """What of a file shows on the wire and to reflection: all but its own name, imports' names and options."""
    bare = FileDescriptorProto()
    bare.CopyFrom(file)
    for name in ("name", "dependency", "options", "source_code_info"):
        bare.ClearField(name)
    for service in bare.service:
        for method in service.method:
            method.ClearField("options")
    for message in bare.message_type:
        strip(message)
    for elements in (bare.message_type, bare.enum_type, bare.service):
        elements.sort(key=lambda element: element.name)
    return bare


def strip(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    message.nested_type.sort(key=lambda nested: nested.name)
    for nested in message.nested_type:
        strip(nested)


def descriptor_of(module: object) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)  # type: ignore[attr-defined]
    return file


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    output = tmp_path_factory.mktemp("upstream") / "set"
    files = FileDescriptorSet.FromString(compile_protos(UPSTREAM, ["inference.proto", "control.proto"], output))
    return {file.name: file for file in files.file}


@pytest.mark.parametrize("name", ["inference", "control"])
def test_the_api_is_field_by_field_the_one_that_vllm_clients_know(
    upstream: dict[str, FileDescriptorProto], name: str
) -> None:
    ours = {"inference": inference_pb2, "control": control_pb2}[name]
    assert wire_form(descriptor_of(ours)) == wire_form(upstream[f"{name}.proto"])


def test_a_changed_field_number_would_be_seen(upstream: dict[str, FileDescriptorProto]) -> None:
    changed = descriptor_of(inference_pb2)
    changed.message_type[0].field[0].number = 99
    assert wire_form(changed) != wire_form(upstream["inference.proto"])


def test_health_and_struct_are_the_published_ones() -> None:
    ours, published = wire_form(descriptor_of(health_pb2)), wire_form(descriptor_of(upstream_health_pb2))
    if "HealthListRequest" not in upstream_health_pb2.DESCRIPTOR.message_types_by_name:
        # a release from before List was added
        del ours.message_type[2:], ours.service[0].method[1]
    assert ours == published
    assert wire_form(descriptor_of(struct_pb2)) == wire_form(descriptor_of(default_struct_pb2))


def test_both_reflection_protocols_are_the_published_one() -> None:
    published = wire_form(descriptor_of(upstream_reflection_pb2))
    assert wire_form(descriptor_of(reflection_v1alpha_pb2)) == published
    # v1 differs from v1alpha in its package alone
    v1 = str(wire_form(descriptor_of(reflection_v1_pb2)))
    assert v1.replace("grpc.reflection.v1", "grpc.reflection.v1alpha") == str(published)


def test_the_generated_modules_hold_what_the_proto_files_say(tmp_path: Path) -> None:
    compiled = FileDescriptorSet.FromString(compile_protos(ROOT / "proto", PROTOS, tmp_path / "set"))
    assert [file.name for file in compiled.file if file.name not in PROTOS] == []
    for file in compiled.file:
        module = importlib.import_module(
            "trio_frontend.protos." + file.name.removesuffix(".proto").replace("/", ".") + "_pb2"
        )
        assert wire_form(descriptor_of(module)) == wire_form(file)
        assert list(module.DESCRIPTOR.dependencies) == [POOL.FindFileByName(name) for name in file.dependency]
