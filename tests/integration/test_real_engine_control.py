"""Protects vllm.Control over a real vLLM engine: what a CPU engine can do works, and statuses are those of vLLM's own frontend."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.real_engine import MODEL, VLLM, require_vllm, serving, serving_vllms_own
from trio_frontend.protos.vllm import control_pb2 as pb
from trio_frontend.protos.vllm import inference_pb2

pytestmark = pytest.mark.real_engine

MAKE_LORA = Path(__file__).resolve().parents[2] / "tools" / "make_lora.py"
LORA_ARGUMENTS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
NAMES = ("--served-model-name", "tiny", "tiny-alias")


class Caller:
    """Calls a server with grpcio. The messages are ours: only their bytes travel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def control(self, name: str, timeout: float = 60.0, **fields: Any) -> Any:
        method = pb.DESCRIPTOR.services_by_name["Control"].methods_by_name[name]
        request_type, response_type = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
        call = self.channel.unary_unary(f"/vllm.Control/{name}", request_type.SerializeToString, response_type.FromString)
        return call(request_type(**fields), timeout=timeout)

    def code(self, name: str, **fields: Any) -> str:
        """The name of the status that the call ends with."""
        try:
            self.control(name, **fields)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def stream(self, text: str, tokens: int, timeout: float = 60.0, **fields: Any) -> Any:
        request = inference_pb2.GenerateRequest(
            text=text, stopping={"max_new_tokens": tokens, "ignore_eos": True}, response={"output_token_ids": True}, **fields
        )
        call = self.channel.unary_stream(
            "/vllm.Inference/GenerateStream",
            inference_pb2.GenerateRequest.SerializeToString,
            inference_pb2.GenerateResponse.FromString,
        )
        return call(request, timeout=timeout)

    def tokens(self, **fields: Any) -> list[int]:
        """The greedy continuation of a fixed prompt, 16 tokens."""
        responses = self.stream("Once upon a time", 16, **fields)
        return [token for response in responses for token in response.outputs.token_ids]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two rank-2 adapters for the model, ``first`` and ``second``."""
    require_vllm()
    directory = tmp_path_factory.mktemp("adapters").resolve()
    for seed, name in enumerate(("first", "second"), start=1):
        command = [str(VLLM.with_name("python")), str(MAKE_LORA), str(MODEL), str(directory / name), "--rank", "2"]
        subprocess.run([*command, "--seed", str(seed)], check=True)
    return directory


def environment(adapters: Path) -> dict[str, str]:
    return {"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(adapters)}


@pytest.fixture(scope="module")
def caller(adapters: Path) -> Iterator[Caller]:
    options = (*NAMES, "--lora-modules", f"at-start={adapters / 'second'}")
    with (
        serving(*options, engine_arguments=LORA_ARGUMENTS, environment=environment(adapters)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Caller(channel)


@pytest.fixture(scope="module")
def vllms_own(adapters: Path) -> Iterator[Caller]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (*NAMES, "--lora-modules", f"at-start={adapters / 'second'}", *LORA_ARGUMENTS)
    with (
        serving_vllms_own(port, *options, environment=environment(adapters)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Caller(channel)


def test_the_servers_description_comes_from_the_engine(caller: Caller) -> None:
    info = caller.control("GetServerInfo")
    assert info.engine_version.startswith("0.")
    assert (info.api_version, info.max_model_len, info.max_running_requests) == ("vllm", 512, 64)
    assert (info.max_loras, info.parallelism.data_parallel_size, info.parallelism.world_size) == (2, 1, 1)
    assert info.total_kv_blocks > 0
    assert info.kv_block_size > 0
    assert info.instance_id
    model = caller.control("GetModelInfo")
    assert (model.served_model_name, list(model.served_model_aliases)) == ("tiny", ["tiny-alias"])
    assert model.supports_lora
    assert list(caller.control("GetKvEventSources").sources) == []


def test_abort_ends_a_live_stream_with_what_it_had(caller: Caller) -> None:
    responses = caller.stream("Once upon a time", 400, request_id="to-abort")
    tokens = 0
    for response in responses:
        tokens += response.outputs.num_tokens
        if tokens == 3:
            caller.control("Abort", request_ids=["to-abort", "unknown"])
        last = response
    assert last.outputs.finish_info.finish_reason == inference_pb2.FinishInfo.ABORTED
    assert last.outputs.finish_info.num_output_tokens == tokens < 400
    caller.control("Abort", request_ids=["to-abort"])


def test_an_adapter_is_loaded_used_by_both_names_and_unloaded(caller: Caller, adapters: Path) -> None:
    plain = caller.tokens()
    loaded = caller.control("LoadLora", lora_name="first", source_path=str(adapters / "first")).adapter
    changed = caller.tokens(lora_name="first")
    assert changed != plain
    assert caller.tokens(model="first") == changed
    assert caller.tokens() == plain
    names = [adapter.lora_name for adapter in caller.control("ListLoras").adapters]
    assert names == ["at-start", "first"]
    assert caller.control("UnloadLora", lora_name="first").adapter == loaded
    with pytest.raises(grpc.RpcError) as caught:
        caller.tokens(lora_name="first")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_adapter_named_at_the_start_is_there(caller: Caller) -> None:
    assert caller.tokens(lora_name="at-start") != caller.tokens()


def test_a_paused_engine_holds_its_requests_until_it_resumes(caller: Caller) -> None:
    expected = caller.tokens()
    responses = caller.stream("Once upon a time", 400)
    next(responses)
    next(responses)
    caller.control("PauseGeneration", mode=pb.PAUSE_MODE_KEEP)
    assert caller.control("IsPaused").paused
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(caller.tokens()))
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()
    caller.control("ResumeGeneration")
    assert not caller.control("IsPaused").paused
    waiting.join(60)
    assert results == [expected]
    assert sum(response.outputs.num_tokens for response in responses) > 300


def test_pausing_ends_what_runs_when_told_to(caller: Caller) -> None:
    responses = caller.stream("Once upon a time", 400)
    next(responses)
    next(responses)
    caller.control("PauseGeneration")
    *_, last = responses
    assert last.outputs.finish_info.finish_reason == inference_pb2.FinishInfo.ABORTED
    caller.control("ResumeGeneration")
    assert len(caller.tokens()) == 16


def test_the_weight_version_is_kept_by_the_engine(caller: Caller) -> None:
    caller.control("UpdateWeightVersion", weight_version="v7")
    assert caller.control("GetWeightVersion").weight_version == "v7"


def calls(adapters: Path) -> list[tuple[str, dict[str, Any]]]:
    """In this order: what comes later builds on what came before."""
    first, second = str(adapters / "first"), str(adapters / "second")
    return [
        ("GetServerInfo", {}),
        ("GetModelInfo", {}),
        ("GetKvEventSources", {}),
        ("Abort", {}),
        ("Abort", {"request_ids": ["unknown", ""]}),
        ("ListLoras", {}),
        ("LoadLora", {}),
        ("LoadLora", {"lora_name": "a"}),
        ("LoadLora", {"lora_name": "a", "source_path": first}),
        ("LoadLora", {"lora_name": "a", "source_path": second}),
        ("LoadLora", {"lora_name": "b", "source_path": f"{adapters}/nope"}),
        ("LoadLora", {"lora_name": "b", "source_path": "/etc"}),
        ("LoadLora", {"lora_name": "b", "source_path": "./first"}),
        ("LoadLora", {"lora_name": "b", "source_path": str(adapters)}),
        ("LoadLora", {"lora_name": "tiny", "source_path": first}),
        ("LoadLora", {"lora_name": "tiny-alias", "source_path": first}),
        ("LoadLora", {"lora_name": "at-start", "source_path": first}),
        ("UnloadLora", {"lora_name": "a"}),
        ("UnloadLora", {"lora_name": "a"}),
        ("UnloadLora", {"lora_name": ""}),
        ("UnloadLora", {"lora_name": "tiny"}),
        ("IsPaused", {}),
        ("ResumeGeneration", {}),
        ("PauseGeneration", {"mode": 9}),
        ("IsSleeping", {}),
        ("Sleep", {}),
        ("Sleep", {"mode": 9}),
        ("WakeUp", {}),
        ("InitWeightTransferEngine", {"init_info_json": b"{}"}),
        ("StartWeightUpdate", {}),
        ("StartDraftWeightUpdate", {}),
        ("UpdateWeights", {"update_info_json": b"["}),
        ("FinishWeightUpdate", {}),
        ("UpdateWeightVersion", {"weight_version": " "}),
        ("UpdateWeightVersion", {"weight_version": "v8"}),
        ("GetWeightVersion", {}),
    ]


def test_statuses_are_those_of_vllms_own_frontend(caller: Caller, vllms_own: Caller, adapters: Path) -> None:
    ours = [(name, fields, caller.code(name, **fields)) for name, fields in calls(adapters)]
    theirs = [(name, fields, vllms_own.code(name, **fields)) for name, fields in calls(adapters)]
    assert ours == theirs


def test_pausing_works_here_where_vllms_own_frontend_fails(caller: Caller, vllms_own: Caller) -> None:
    # 0.33's frontend calls pause_generation, which 0.32's engine has not
    assert vllms_own.code("PauseGeneration") == "INTERNAL"
    assert caller.code("PauseGeneration") == "OK"
    assert caller.code("ResumeGeneration") == "OK"


def test_a_description_is_that_of_vllms_own_frontend(caller: Caller, vllms_own: Caller) -> None:
    ours, theirs = caller.control("GetServerInfo"), vllms_own.control("GetServerInfo")
    theirs.instance_id = ours.instance_id
    # as text, which leaves out the fields that are not in the API's .proto files
    assert str(ours).splitlines() == str(theirs).splitlines()
    our_model, their_model = caller.control("GetModelInfo"), vllms_own.control("GetModelInfo")
    their_model.model_id = our_model.model_id
    assert str(our_model).splitlines() == str(their_model).splitlines()
