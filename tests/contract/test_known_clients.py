"""Protects the programs that use vLLM's gRPC API: what each sends, and what it takes for granted in the answers.

Written from what they do, with grpcio and stubs of vLLM's own protos: NVIDIA Dynamo's vLLM sidecar (lib/sidecar/vllm of ai-dynamo),
the SMG gateway (crates/grpc_client/src/vllm_native.rs), vllm-router (src/backend), and Kubernetes' gRPC probes.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.contract.cases import step
from tests.contract.serving import ServedEngine, serving
from tests.protos.upstream import generate_stubs
from tests.services.inference_rig import EOS, byte_ids

PATIENCE = 5.0
"""Seconds after which something that should have happened has not."""


@pytest.fixture(scope="module")
def pb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    directory = tmp_path_factory.mktemp("stubs")
    generate_stubs(directory)
    sys.path.insert(0, str(directory))
    yield importlib.import_module("inference_pb2")
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def served() -> Iterator[ServedEngine]:
    with serving(pace=0.005) as served:
        yield served


@pytest.fixture(scope="module")
def channel(served: ServedEngine) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@pytest.fixture
def inference(pb: ModuleType, channel: grpc.Channel) -> Any:
    return importlib.import_module("inference_pb2_grpc").InferenceStub(channel)


@pytest.fixture
def control(pb: ModuleType, channel: grpc.Channel) -> Any:
    return importlib.import_module("control_pb2_grpc").ControlStub(channel)


@pytest.fixture
def control_pb(pb: ModuleType) -> ModuleType:
    return importlib.import_module("control_pb2")


def eventually(happened: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.005)
    return True


# NVIDIA Dynamo's vLLM sidecar: token ids in, token ids out, in a stream.


def dynamo_request(pb: ModuleType, script: list[dict[str, Any]], **changes: Any) -> Any:
    """As its converter fills it: every group present, zeros for what the caller left out, the model unnamed."""
    fields: dict[str, Any] = {
        "request_id": "dynamo-1",
        "token_ids": {"ids": [300, 301, 302]},
        "sampling": {"num_sequences": 1},
        "decoding": {},
        "stopping": {"max_new_tokens": 20, "stop_token_ids": [EOS]},
        "response": {"output_text": True, "output_token_ids": True},
        "kv": {},
        "priority": -2,
    }
    message = pb.GenerateRequest(**(fields | changes))
    json_format.ParseDict({"steps": script}, message.kv.kv_transfer_params)
    return message


def dynamo_reads(messages: Iterator[Any], prompt_length: int, logprobs: bool = False) -> tuple[list[int], str, Any]:
    """The checks that its response converter makes: any of these failing is a protocol error there."""
    ids: list[int] = []
    text, finish = "", None
    for message in messages:
        if message.HasField("prompt_info"):
            assert message.prompt_info.num_prompt_tokens == prompt_length
        if not message.HasField("outputs"):
            continue
        output = message.outputs
        assert finish is None
        assert output.index == 0
        assert output.num_tokens == len(output.token_ids)
        if logprobs:
            assert len(output.logprobs) == len(output.ranks) == len(output.candidate_tokens) == len(output.token_ids)
        ids += output.token_ids
        text += output.text
        if output.HasField("finish_info"):
            finish = output.finish_info
            assert finish.num_output_tokens == len(ids)
            assert finish.finish_reason != 0
    assert finish is not None
    return ids, text, finish


def test_dynamo_waits_for_both_services_by_the_health_protocol(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("vllm.Control", "vllm.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_dynamo_discovers_the_model_and_what_the_engine_holds(control: Any, control_pb: ModuleType) -> None:
    model = control.GetModelInfo(control_pb.GetModelInfoRequest(), timeout=PATIENCE)
    server = control.GetServerInfo(control_pb.GetServerInfoRequest(), timeout=PATIENCE)
    assert server.api_version == "vllm"
    assert model.model_id.strip()
    assert (model.served_model_name, list(model.served_model_aliases)) == ("tiny", ["tiny-alias"])
    assert model.supports_token_ids_input
    assert server.parallelism.data_parallel_size >= 1
    assert server.parallelism.data_parallel_rank == 0
    assert min(server.max_model_len, server.kv_block_size, server.total_kv_blocks, server.max_running_requests) > 0


def test_dynamo_streams_token_ids(pb: ModuleType, inference: Any) -> None:
    script = [step("ab"), step("c"), step([EOS], finish="stop")]
    ids, text, finish = dynamo_reads(inference.GenerateStream(dynamo_request(pb, script), timeout=PATIENCE), 3)
    assert (ids, text) == ([*byte_ids("abc"), EOS], "abc")
    assert finish.finish_reason == pb.FinishInfo.STOP
    assert finish.eos_token_id == EOS


def test_dynamo_reads_as_many_logprobs_as_tokens_in_each_message(pb: ModuleType, inference: Any) -> None:
    row = [[5, 6, 7], [-1.0, -2.0, -3.0], 4]
    script = [step("ab", logprobs=[row, row], prompt_logprobs=[row, row]), step("c", logprobs=[row]), step(finish="length")]
    response = {
        "prompt_token_ids": True,
        "prompt_logprobs": True,
        "prompt_candidates": {"top_n": 2},
        "output_text": True,
        "output_token_ids": True,
        "output_logprobs": True,
        "output_candidates": {"top_n": 2},
    }
    messages = list(inference.GenerateStream(dynamo_request(pb, script, response=response), timeout=PATIENCE))
    dynamo_reads(iter(messages), 3, logprobs=True)
    info = messages[0].prompt_info
    assert len(info.token_ids) == len(info.logprobs) == len(info.ranks) == len(info.candidate_tokens) == 3


def test_dynamo_hands_a_prefill_over_and_gets_the_engines_own_parameters_back(pb: ModuleType, inference: Any) -> None:
    handed = {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_block_ids": [1, 2]}
    request = dynamo_request(
        pb, [step("a", finish="length", kv=handed)], stopping={"max_new_tokens": 1, "min_new_tokens": 1}
    )
    request.kv.kv_transfer_params.update({"do_remote_decode": True})
    _, _, finish = dynamo_reads(inference.GenerateStream(request, timeout=PATIENCE), 3)
    assert json_format.MessageToDict(finish.kv_transfer_params) == handed


def test_dynamos_parameters_reach_the_engine_with_whole_numbers_whole(
    pb: ModuleType, inference: Any, served: ServedEngine
) -> None:
    request = dynamo_request(pb, [step("a", finish="length")], kv={"cache_salt": "dynamo-cache-salt:tenant"})
    request.kv.kv_transfer_params.update({"remote_port": "5600", "remote_block_ids": [3, 4], "tp_size": 2, "ratio": 0.5})
    dynamo_reads(inference.GenerateStream(request, metadata=[("x-data-parallel-rank", "0")], timeout=PATIENCE), 3)
    sent = served.engine.requests[-1].request
    params = (sent.sampling.extra_args or {})["kv_transfer_params"]
    assert (params["remote_port"], params["remote_block_ids"], params["tp_size"], params["ratio"]) == (
        "5600",
        [3, 4],
        2,
        0.5,
    )
    assert all(type(block) is int for block in params["remote_block_ids"])
    assert (sent.cache_salt, sent.priority, sent.data_parallel_rank) == ("dynamo-cache-salt:tenant", -2, 0)


def test_dynamo_asks_for_all_candidates_and_is_told_the_limit(pb: ModuleType, inference: Any) -> None:
    response = {"output_token_ids": True, "output_logprobs": True, "output_candidates": {"all": True}}
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.GenerateStream(dynamo_request(pb, [], response=response), timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_dynamo_drops_a_stream_and_the_request_ends_in_the_engine(
    pb: ModuleType, inference: Any, served: ServedEngine
) -> None:
    stream = inference.GenerateStream(dynamo_request(pb, [step("a")]), timeout=PATIENCE)
    next(stream)
    next(stream)
    handle = served.engine.requests[-1]
    assert not handle.closed.is_set()
    stream.cancel()
    assert eventually(handle.aborted.is_set)


def test_dynamo_aborts_by_its_own_id_and_the_stream_ends_with_aborted(
    pb: ModuleType, inference: Any, control: Any, control_pb: ModuleType
) -> None:
    stream = inference.GenerateStream(dynamo_request(pb, [step("ab")], request_id="to-abort"), timeout=PATIENCE)
    messages = [next(stream), next(stream)]
    control.Abort(control_pb.AbortRequest(request_ids=["to-abort"]), timeout=PATIENCE)
    _, text, finish = dynamo_reads(iter([*messages, *stream]), 3)
    assert (text, finish.finish_reason) == ("ab", pb.FinishInfo.ABORTED)


# The SMG gateway: one channel for both services, an Abort for each stream that it lets go, trace context on every call.


def test_smg_aborts_what_it_drops_and_what_has_ended_alike(
    pb: ModuleType, inference: Any, control: Any, control_pb: ModuleType, served: ServedEngine
) -> None:
    stream = inference.GenerateStream(dynamo_request(pb, [step("a")], request_id="smg"), timeout=PATIENCE)
    next(stream)
    assert eventually(lambda: served.engine.requests[-1].request.external_request_id == "smg")
    handle = served.engine.requests[-1]
    stream.cancel()
    for _ in range(2):
        assert control.Abort(control_pb.AbortRequest(request_ids=["smg"]), timeout=PATIENCE) == control_pb.AbortResponse()
    assert eventually(handle.aborted.is_set)


def test_smg_sends_trace_context_with_every_call(
    pb: ModuleType, inference: Any, control: Any, control_pb: ModuleType, served: ServedEngine
) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metadata = [("traceparent", parent), ("tracestate", "smg=1"), ("baggage", "user=1")]
    control.GetServerInfo(control_pb.GetServerInfoRequest(), metadata=metadata, timeout=PATIENCE)
    request = dynamo_request(pb, [step("a", finish="length")])
    dynamo_reads(inference.GenerateStream(request, metadata=metadata, timeout=PATIENCE), 3)
    assert served.engine.requests[-1].request.trace_headers == {"traceparent": parent, "tracestate": "smg=1"}


def test_smg_asks_where_kv_events_are(control: Any, control_pb: ModuleType) -> None:
    assert list(control.GetKvEventSources(control_pb.GetKvEventSourcesRequest(), timeout=PATIENCE).sources) == []


# vllm-router: tokenizes and detokenizes itself, asks for text only where a stop string may cut it.


def router_request(pb: ModuleType, script: list[dict[str, Any]], stop: list[str], trim: bool) -> Any:
    message = pb.GenerateRequest(
        request_id="chatcmpl-1",
        model="tiny",
        token_ids={"ids": [300, 301]},
        temperature=1.0,
        sampling={"num_sequences": 0},
        decoding={},
        stopping={"max_new_tokens": 0, "stop_strings": stop, "include_stop_strings": not trim},
        response={"output_text": bool(stop) and trim, "output_token_ids": True, "skip_special_tokens": True},
        kv={"cache_salt": ""},
    )
    json_format.ParseDict({"steps": script}, message.kv.kv_transfer_params)
    return message


def test_the_router_detokenizes_ids_and_gets_no_text(pb: ModuleType, inference: Any) -> None:
    script = [step("a"), step("世".encode()[:2]), step("世".encode()[2:], finish="length")]
    messages = list(inference.GenerateStream(router_request(pb, script, [], True), timeout=PATIENCE))
    assert "".join(message.outputs.text for message in messages) == ""
    assert [token for message in messages for token in message.outputs.token_ids] == byte_ids("a世")
    assert sum(message.outputs.num_tokens for message in messages) == 4
    assert [message.outputs.HasField("finish_info") for message in messages].count(True) == 1


@pytest.mark.parametrize(("trim", "text"), [(True, "a"), (False, "")])
def test_the_router_takes_the_servers_text_where_a_stop_string_cuts_it(
    pb: ModuleType, inference: Any, trim: bool, text: str
) -> None:
    script = [step("aE"), step("ND"), step("x")]
    messages = list(inference.GenerateStream(router_request(pb, script, ["END"], trim), timeout=PATIENCE))
    assert "".join(message.outputs.text for message in messages) == text
    assert messages[-1].outputs.finish_info.stop_string == "END"
    assert [token for message in messages for token in message.outputs.token_ids] == byte_ids("aEND")


def test_the_router_maps_statuses_and_needs_the_right_ones(pb: ModuleType, inference: Any) -> None:
    wrong_model = router_request(pb, [], [], True)
    wrong_model.model = "other"
    bad = router_request(pb, [], [""], True)
    failing = router_request(pb, [step("a"), step(finish="error")], [], True)
    for request, code in (
        (wrong_model, grpc.StatusCode.NOT_FOUND),
        (bad, grpc.StatusCode.INVALID_ARGUMENT),
        (failing, grpc.StatusCode.INTERNAL),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(inference.GenerateStream(request, timeout=PATIENCE))
        assert caught.value.code() is code


def test_a_newer_clients_unknown_fields_are_passed_over(pb: ModuleType, channel: grpc.Channel) -> None:
    # Field 16 is "watermarking" in a later inference.proto, a bool; field 99 is anyone's.
    message = router_request(pb, [step("a", finish="length")], [], True).SerializeToString() + b"\x80\x01\x01\x9a\x06\x01x"
    call = channel.unary_unary("/vllm.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString)
    assert call(message, timeout=PATIENCE).outputs.num_tokens == 1


def test_the_router_and_kubernetes_ask_for_the_whole_servers_health(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status == health_pb2.HealthCheckResponse.SERVING


def test_many_streams_of_one_channel_run_at_once(pb: ModuleType, inference: Any) -> None:
    script = [step("a"), step("b"), step("c", finish="length")]
    streams = [
        inference.GenerateStream(dynamo_request(pb, script, request_id=f"r{n}"), timeout=4 * PATIENCE) for n in range(64)
    ]
    assert [dynamo_reads(stream, 3)[1] for stream in streams] == ["abc"] * 64
