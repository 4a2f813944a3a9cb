"""Protects the Inference contract, field by field, through grpcio and stubs of vLLM's own protos; see ``cases``."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.contract.answers import Client, problems
from tests.contract.cases import CASES, Case
from tests.contract.serving import serving
from tests.protos.upstream import generate_stubs

COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with serving() as served, grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture(scope="module", params=["Inference", "Generate"])
def client(request: pytest.FixtureRequest, channel: grpc.Channel, stubs: Path) -> Client:
    pb, grpc_stubs = importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc")
    return Client(channel, pb, grpc_stubs, request.param)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("stubs")
    generate_stubs(directory)
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_contract(case: Case, client: Client) -> None:
    assert list(problems(case, client.unary(case), client.stream(case), words=True)) == []


def test_there_are_enough_cases_and_each_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


def test_each_difference_to_vllms_own_frontend_is_documented_with_a_reason() -> None:
    documented = set(re.findall(r"^### `([\w.-]+)`", COMPATIBILITY.read_text(), re.MULTILINE))
    assert {case.oracle for case in CASES if case.oracle is not None} <= documented
