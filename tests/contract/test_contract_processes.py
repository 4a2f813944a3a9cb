"""Protects the contract where it counts: the command line over ZeroMQ, a real vLLM engine, and vLLM's own frontend as the measure."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.contract.answers import Client, problems
from tests.contract.cases import CASES, FATAL, Case
from tests.contract.model import write_model
from tests.integration.real_engine import require_vllm, started
from tests.protos.upstream import generate_stubs

SERVES = re.compile(r"Serving .* on (\S+:\d+)$")
ENGINE_ARGUMENTS = ("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "256", "--enforce-eager")
NAMES = ("--served-model-name", "tiny", "tiny-alias")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("stubs")
    generate_stubs(directory)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def differences(address: str, cases: list[Case], *, words: bool) -> dict[str, list[str]]:
    with grpc.insecure_channel(address) as channel:
        client = Client(channel, importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc"))
        found = {case.name: list(problems(case, client.unary(case), client.stream(case), words=words)) for case in cases}
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.process
def test_the_contract_holds_for_the_command_line_over_a_scripted_engine_core(model: Path) -> None:
    handshake = f"tcp://127.0.0.1:{free_port()}"
    core = subprocess.Popen([sys.executable, "-m", "tests.contract.scripted_core", "--handshake", handshake])
    try:
        command = [sys.executable, "-m", "trio_frontend", "serve", str(model), "--port", "0", *NAMES]
        with started([*command, "--handshake-address", handshake], None, SERVES) as address:
            assert differences(address, CASES, words=True) == {}
    finally:
        core.terminate()
        core.wait()


@pytest.mark.real_engine
def test_the_contract_holds_over_a_real_engine(model: Path) -> None:
    command = [sys.executable, "-m", "trio_frontend", "serve", str(model), "--port", "0", *NAMES]
    command += ["--engine", "vllm", "--vllm", str(require_vllm()), "--", *ENGINE_ARGUMENTS]
    with started(command, None, SERVES) as address:
        assert differences(address, [case for case in CASES if case.script is None], words=True) == {}


@pytest.mark.real_engine
def test_vllms_own_frontend_differs_only_where_that_is_documented(model: Path) -> None:
    port = free_port()
    command = [str(require_vllm()), "serve", str(model), "--host", "127.0.0.1", "--port", str(free_port()), *NAMES]
    command += ["--grpc-port", str(port), *ENGINE_ARGUMENTS]
    asked = [case for case in CASES if case.script is None and case.oracle != FATAL]
    with started(command, {"VLLM_USE_RUST_FRONTEND": "1"}, re.compile("gRPC server is ready")):
        found = differences(f"127.0.0.1:{port}", asked, words=False)
    assert set(found) <= {case.name for case in asked if case.oracle is not None}
