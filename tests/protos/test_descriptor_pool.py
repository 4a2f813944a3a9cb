"""Protects apps that embed us: our messages claim no name in protobuf's default descriptor pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.protos.upstream import generate_stubs
from trio_frontend.protos.google.protobuf import struct_pb2
from trio_frontend.protos.vllm import inference_pb2

OURS = [
    "trio_frontend.protos.google.protobuf.struct_pb2",
    "trio_frontend.protos.grpc.health.v1.health_grpc",
    "trio_frontend.protos.grpc.reflection.v1.reflection_grpc",
    "trio_frontend.protos.grpc.reflection.v1alpha.reflection_grpc",
    "trio_frontend.protos.vllm.control_grpc",
    "trio_frontend.protos.vllm.inference_grpc",
]
THEIRS = [
    "google.protobuf.struct_pb2",
    "grpc_health.v1.health_pb2_grpc",
    "grpc_reflection.v1alpha.reflection_pb2_grpc",
    "grpc_reflection.v1alpha.proto_reflection_descriptor_database",
    "control_pb2_grpc",
    "inference_pb2_grpc",
]
MEET_AS_BYTES = """
import inference_pb2 as theirs
from trio_frontend.protos.vllm import inference_pb2 as ours
request = ours.GenerateRequest(text="hello", temperature=0.5)
request.kv.kv_transfer_params.update({"blocks": [1, None, {"x": "y"}]})
copy = theirs.GenerateRequest.FromString(request.SerializeToString())
assert ours.GenerateRequest.FromString(copy.SerializeToString()) == request
assert dict(copy.kv.kv_transfer_params)["blocks"][2]["x"] == "y"
assert type(copy) is not type(request)
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stubs")
    generate_stubs(directory)
    return directory


@pytest.mark.parametrize("modules", [OURS + THEIRS, THEIRS + OURS], ids=["ours first", "theirs first"])
def test_our_messages_live_beside_other_packages_of_the_same_names(stubs: Path, modules: list[str]) -> None:
    program = "\n".join(
        [f"import sys; sys.path.insert(0, {str(stubs)!r})", *(f"import {m}" for m in modules), MEET_AS_BYTES]
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_a_struct_of_ours_reads_and_writes_as_a_mapping() -> None:
    parameters = inference_pb2.KVCacheParameters()
    parameters.kv_transfer_params.update({"a": 1.5, "b": [True, None], "c": {"d": "e"}})
    assert isinstance(parameters.kv_transfer_params, struct_pb2.Struct)
    assert parameters.kv_transfer_params["a"] == 1.5
    assert list(parameters.kv_transfer_params["b"]) == [True, None]
    assert parameters.kv_transfer_params["c"]["d"] == "e"
