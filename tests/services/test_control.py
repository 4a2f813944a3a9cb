"""Protects vllm.Control: for each call what succeeds, what is refused before an engine sees it, and an engine's failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from google.protobuf.message import Message

from tests.services.control_server import ControlServer, serve_control
from trio_frontend.client import RpcError, StatusCode
from trio_frontend.engine.base import Capabilities, EngineInfo, EngineUnavailableError, UtilityCallError
from trio_frontend.protos.vllm import control_pb2 as pb
from trio_frontend.services.lora import PATH_PREFIXES_VARIABLE

ENGINE = EngineInfo(
    max_model_len=4096,
    num_gpu_blocks=100,
    block_size=16,
    effective_attention_block_size=16,
    vllm_version="0.33.0",
    instance_id="a",
    world_size=2,
    tensor_parallel_size=2,
    max_num_seqs=10,
    max_num_batched_tokens=200,
    supports_lora=True,
    max_loras=2,
    weight_transfer_backend="nccl",
    enable_sleep_mode=True,
    supports_draft_weight_updates=True,
)
BARE = replace(
    ENGINE,
    supports_lora=False,
    max_loras=0,
    weight_transfer_backend=None,
    enable_sleep_mode=False,
    supports_draft_weight_updates=False,
)


@pytest.fixture
async def server(nursery: trio.Nursery) -> ControlServer:
    return await serve_control(nursery, [ENGINE])


@pytest.fixture
async def bare(nursery: trio.Nursery) -> ControlServer:
    return await serve_control(nursery, [BARE])


async def refusal(call: Awaitable[Any]) -> tuple[StatusCode, str]:
    with pytest.raises(RpcError) as caught:
        await call
    return caught.value.code, caught.value.message


# Every call that reaches the engine: the request, the utility calls it makes, and the answer.
UTILITY_CALLS: list[tuple[str, Message, list[tuple[Any, ...]], Message]] = [
    ("PauseGeneration", pb.PauseGenerationRequest(), [("pause_generation", "abort", True)], pb.PauseGenerationResponse()),
    (
        "PauseGeneration",
        pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT, clear_cache=False),
        [("pause_generation", "wait", False)],
        pb.PauseGenerationResponse(),
    ),
    (
        "PauseGeneration",
        pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP, clear_cache=True),
        [("pause_generation", "keep", True)],
        pb.PauseGenerationResponse(),
    ),
    ("ResumeGeneration", pb.ResumeGenerationRequest(), [("resume_scheduler",)], pb.ResumeGenerationResponse()),
    ("IsPaused", pb.IsPausedRequest(), [("is_scheduler_paused",)], pb.IsPausedResponse(paused=True)),
    ("Sleep", pb.SleepRequest(), [("sleep", 1, "abort")], pb.SleepResponse()),
    ("Sleep", pb.SleepRequest(level=0, mode=pb.PAUSE_MODE_KEEP), [("sleep", 0, "keep")], pb.SleepResponse()),
    ("WakeUp", pb.WakeUpRequest(), [("wake_up", None)], pb.WakeUpResponse()),
    ("WakeUp", pb.WakeUpRequest(tags=["weights", "kv_cache"]), [("wake_up", ["weights", "kv_cache"])], pb.WakeUpResponse()),
    ("IsSleeping", pb.IsSleepingRequest(), [("is_sleeping",)], pb.IsSleepingResponse(sleeping=True)),
    (
        "InitWeightTransferEngine",
        pb.InitWeightTransferEngineRequest(init_info_json=b'{"port": 1, "x": [null, 1.5]}'),
        [("collective_rpc", "init_weight_transfer_engine", None, [], {"init_info": {"port": 1, "x": [None, 1.5]}})],
        pb.InitWeightTransferEngineResponse(),
    ),
    (
        "StartWeightUpdate",
        pb.StartWeightUpdateRequest(),
        [("collective_rpc", "start_weight_update", None, [], {})],
        pb.StartWeightUpdateResponse(),
    ),
    (
        "StartDraftWeightUpdate",
        pb.StartDraftWeightUpdateRequest(),
        [("collective_rpc", "start_draft_weight_update", None, [], {})],
        pb.StartDraftWeightUpdateResponse(),
    ),
    (
        "UpdateWeights",
        pb.UpdateWeightsRequest(update_info_json=b'{"names": ["a"]}'),
        [("collective_rpc", "update_weights", None, [], {"update_info": {"names": ["a"]}})],
        pb.UpdateWeightsResponse(),
    ),
    (
        "FinishWeightUpdate",
        pb.FinishWeightUpdateRequest(),
        [("collective_rpc", "finish_weight_update", None, [], {})],
        pb.FinishWeightUpdateResponse(),
    ),
    (
        "FinishWeightUpdate",
        pb.FinishWeightUpdateRequest(weight_version="v3"),
        [("collective_rpc", "finish_weight_update", None, [], {}), ("set_weight_version", "v3")],
        pb.FinishWeightUpdateResponse(),
    ),
    (
        "UpdateWeightVersion",
        pb.UpdateWeightVersionRequest(weight_version=" v9 "),
        [("set_weight_version", " v9 ")],
        pb.UpdateWeightVersionResponse(),
    ),
    (
        "GetWeightVersion",
        pb.GetWeightVersionRequest(),
        [("get_weight_version",)],
        pb.GetWeightVersionResponse(weight_version="v1"),
    ),
    (
        "LoadLora",
        pb.LoadLoraRequest(lora_name="a", source_path="org/adapter"),
        [("add_lora", ["a", 1, "org/adapter"])],
        pb.LoadLoraResponse(adapter={"lora_id": 1, "lora_name": "a", "source_path": "org/adapter"}),
    ),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(UTILITY_CALLS)]


@pytest.mark.parametrize(("name", "request_", "calls", "answer"), UTILITY_CALLS, ids=IDS)
async def test_a_call_becomes_its_utility_calls(
    server: ControlServer, name: str, request_: Message, calls: list[tuple[Any, ...]], answer: Message
) -> None:
    assert await server.call(name, request_) == answer
    assert [(method, *arguments) for method, arguments in server.engine.utility_calls] == calls


@pytest.mark.parametrize(("name", "request_", "calls", "answer"), UTILITY_CALLS, ids=IDS)
async def test_a_failure_in_the_engine_is_internal_and_names_both_methods(
    server: ControlServer, name: str, request_: Message, calls: list[tuple[Any, ...]], answer: Message
) -> None:
    method = calls[0][0]
    server.answers[method] = UtilityCallError(method, "it broke")
    code, message = await refusal(server.call(name, request_))
    assert code is StatusCode.INTERNAL
    assert message.endswith(f"failed: {method} failed: it broke")
    assert name in message or "'a'" in message


@pytest.mark.parametrize(("name", "request_", "calls", "answer"), UTILITY_CALLS, ids=IDS)
async def test_a_call_that_the_engine_has_not_is_unimplemented(
    server: ControlServer, name: str, request_: Message, calls: list[tuple[Any, ...]], answer: Message
) -> None:
    server.answers.clear()
    code, message = await refusal(server.call(name, request_))
    assert code is StatusCode.UNIMPLEMENTED
    assert "the engine has no" in message


@pytest.mark.parametrize(("name", "request_", "calls", "answer"), UTILITY_CALLS, ids=IDS)
async def test_a_call_without_an_engine_is_unavailable(
    server: ControlServer, name: str, request_: Message, calls: list[tuple[Any, ...]], answer: Message
) -> None:
    server.answers[calls[0][0]] = EngineUnavailableError("no engine: engine_lost")
    code, message = await refusal(server.call(name, request_))
    assert code is StatusCode.UNAVAILABLE
    assert "no engine: engine_lost" in message


SLEEP = "sleep mode is not configured; start vLLM with --enable-sleep-mode"
TRANSFER = "weight transfer is not configured; start vLLM with --weight-transfer-config"
LORA = "the engine was not started with LoRA enabled; start vLLM with --enable-lora"


@pytest.mark.parametrize(
    ("name", "request_", "said"),
    [
        ("Sleep", pb.SleepRequest(mode=9), SLEEP),
        ("WakeUp", pb.WakeUpRequest(), SLEEP),
        ("InitWeightTransferEngine", pb.InitWeightTransferEngineRequest(), TRANSFER),
        ("StartWeightUpdate", pb.StartWeightUpdateRequest(), TRANSFER),
        ("StartDraftWeightUpdate", pb.StartDraftWeightUpdateRequest(), TRANSFER),
        ("UpdateWeights", pb.UpdateWeightsRequest(update_info_json=b"[]"), TRANSFER),
        ("FinishWeightUpdate", pb.FinishWeightUpdateRequest(weight_version=" "), TRANSFER),
        ("LoadLora", pb.LoadLoraRequest(), LORA),
        ("UnloadLora", pb.UnloadLoraRequest(lora_name="a"), LORA),
        ("ListLoras", pb.ListLorasRequest(), LORA),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
async def test_what_the_engine_was_not_started_for_is_a_failed_precondition_naming_the_flag(
    bare: ControlServer, name: str, request_: Message, said: str
) -> None:
    assert await refusal(bare.call(name, request_)) == (StatusCode.FAILED_PRECONDITION, said)
    assert bare.engine.utility_calls == []


async def test_a_draft_update_without_a_draft_model_is_a_failed_precondition(nursery: trio.Nursery) -> None:
    server = await serve_control(nursery, [replace(ENGINE, supports_draft_weight_updates=False)])
    code, message = await refusal(server.call("StartDraftWeightUpdate", pb.StartDraftWeightUpdateRequest()))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "--speculative-config" in message


@pytest.mark.parametrize(
    ("name", "request_", "said"),
    [
        ("PauseGeneration", pb.PauseGenerationRequest(mode=9), "mode 9: invalid pause mode"),
        ("PauseGeneration", pb.PauseGenerationRequest(mode=-1), "mode -1: invalid pause mode"),
        ("Sleep", pb.SleepRequest(mode=4), "mode 4: invalid pause mode"),
        ("UpdateWeightVersion", pb.UpdateWeightVersionRequest(), "weight_version must not be empty"),
        ("UpdateWeightVersion", pb.UpdateWeightVersionRequest(weight_version=" \t"), "weight_version must not be empty"),
        ("FinishWeightUpdate", pb.FinishWeightUpdateRequest(weight_version=""), "weight_version must not be empty"),
        ("LoadLora", pb.LoadLoraRequest(source_path="org/x"), "lora_name ''"),
        ("LoadLora", pb.LoadLoraRequest(lora_name=" ", source_path="org/x"), "lora_name ' '"),
        ("LoadLora", pb.LoadLoraRequest(lora_name="a"), "source_path ''"),
        ("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path="/adapters/x"), PATH_PREFIXES_VARIABLE),
        ("UnloadLora", pb.UnloadLoraRequest(), "lora_name ''"),
    ],
    ids=str,
)
async def test_a_bad_argument_is_named_and_reaches_no_engine(
    server: ControlServer, name: str, request_: Message, said: str
) -> None:
    code, message = await refusal(server.call(name, request_))
    assert code is StatusCode.INVALID_ARGUMENT
    assert said in message
    assert server.engine.utility_calls == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'{"a": NaN}', b'{"a": 1} x', b"\xff", b'{"a": 1' + b"0" * 30 + b"}"]
)
@pytest.mark.parametrize(
    ("name", "request_type", "field"),
    [
        ("InitWeightTransferEngine", pb.InitWeightTransferEngineRequest, "init_info_json"),
        ("UpdateWeights", pb.UpdateWeightsRequest, "update_info_json"),
    ],
)
async def test_a_body_that_is_no_json_object_is_an_invalid_argument(
    server: ControlServer, name: str, request_type: Callable[..., Message], field: str, body: bytes
) -> None:
    code, message = await refusal(server.call(name, request_type(**{field: body})))
    assert code is StatusCode.INVALID_ARGUMENT
    assert message.startswith(f"{field} must contain")
    assert server.engine.utility_calls == []


async def test_json_nested_beyond_reason_is_an_invalid_argument(server: ControlServer) -> None:
    request = pb.UpdateWeightsRequest(update_info_json=b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert (await refusal(server.call("UpdateWeights", request)))[0] is StatusCode.INVALID_ARGUMENT


async def test_pausing_an_older_engine_uses_pause_scheduler(server: ControlServer) -> None:
    del server.answers["pause_generation"]
    server.answers["pause_scheduler"] = [None]
    await server.call("PauseGeneration", pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
    assert server.engine.utility_calls == [("pause_generation", ("wait", True)), ("pause_scheduler", ("wait", True))]


async def test_an_engines_failure_to_pause_is_not_tried_again_under_another_name(server: ControlServer) -> None:
    server.answers["pause_generation"] = UtilityCallError("pause_generation", "it broke")
    server.answers["pause_scheduler"] = [None]
    assert (await refusal(server.call("PauseGeneration", pb.PauseGenerationRequest())))[0] is StatusCode.INTERNAL
    assert len(server.engine.utility_calls) == 1


@pytest.mark.parametrize(
    ("name", "request_", "method", "answers"),
    [
        ("IsPaused", pb.IsPausedRequest(), "is_scheduler_paused", [True, False]),
        ("IsSleeping", pb.IsSleepingRequest(), "is_sleeping", [False, True]),
        ("GetWeightVersion", pb.GetWeightVersionRequest(), "get_weight_version", ["a", "b"]),
        ("IsPaused", pb.IsPausedRequest(), "is_scheduler_paused", [None, None]),
        ("IsSleeping", pb.IsSleepingRequest(), "is_sleeping", ["x", "x"]),
        ("IsSleeping", pb.IsSleepingRequest(), "is_sleeping", [1, 1]),
        ("GetWeightVersion", pb.GetWeightVersionRequest(), "get_weight_version", [None, "b"]),
        ("GetWeightVersion", pb.GetWeightVersionRequest(), "get_weight_version", [["a"], ["a"]]),
    ],
    ids=str,
)
async def test_engines_that_disagree_or_answer_nonsense_are_an_internal_error(
    server: ControlServer, name: str, request_: Message, method: str, answers: list[Any]
) -> None:
    server.answers[method] = answers
    code, message = await refusal(server.call(name, request_))
    assert code is StatusCode.INTERNAL
    assert message.startswith(f"{name} failed: ")
    assert method in message


async def test_changes_run_one_at_a_time_and_questions_do_not_wait(server: ControlServer) -> None:
    drained = trio.Event()
    started = trio.Event()
    order: list[str] = []

    async def pause(mode: str, clear_cache: bool) -> list[None]:
        started.set()
        await drained.wait()
        order.append("paused")
        return [None]

    server.answers["pause_generation"] = pause
    async with trio.open_nursery() as nursery:

        async def resume() -> None:
            await server.call("ResumeGeneration", pb.ResumeGenerationRequest())
            order.append("resumed")

        nursery.start_soon(server.call, "PauseGeneration", pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        await started.wait()
        nursery.start_soon(resume)
        with trio.fail_after(5):
            assert (await server.call("IsPaused", pb.IsPausedRequest())).paused
            await server.call("GetWeightVersion", pb.GetWeightVersionRequest())
        assert ("resume_scheduler", ()) not in server.engine.utility_calls
        drained.set()
    assert order == ["paused", "resumed"]


async def test_a_caller_that_gives_up_waiting_leaves_the_way_free(server: ControlServer) -> None:
    async def pause(mode: str, clear_cache: bool) -> list[None]:
        await trio.sleep_forever()
        return [None]

    server.answers["pause_generation"] = pause
    with trio.move_on_after(0.05) as scope:
        await server.call("PauseGeneration", pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
    assert scope.cancelled_caught
    with trio.fail_after(5):
        await server.call("ResumeGeneration", pb.ResumeGenerationRequest())


# LoRA.


async def test_loaded_adapters_are_listed_by_name_and_resolved(server: ControlServer) -> None:
    for name in ("b", "a"):
        await server.call("LoadLora", pb.LoadLoraRequest(lora_name=name, source_path=f"org/{name}"))
    adapters = (await server.call("ListLoras", pb.ListLorasRequest())).adapters
    assert [(a.lora_name, a.lora_id, a.source_path) for a in adapters] == [("a", 2, "org/a"), ("b", 1, "org/b")]
    resolved = server.loras.resolve("a")
    assert resolved is not None
    assert (resolved.name, resolved.id, resolved.path) == ("a", 2, "org/a")
    assert server.loras.resolve("c") is None


async def test_an_unloaded_adapter_is_gone_and_its_id_is_not_used_again(server: ControlServer) -> None:
    load = pb.LoadLoraRequest(lora_name="a", source_path="org/a")
    await server.call("LoadLora", load)
    answer = await server.call("UnloadLora", pb.UnloadLoraRequest(lora_name="a"))
    assert answer.adapter == pb.LoraAdapter(lora_id=1, lora_name="a", source_path="org/a")
    assert server.engine.utility_calls[-1] == ("remove_lora", (1,))
    assert server.loras.resolve("a") is None
    assert (await server.call("LoadLora", load)).adapter.lora_id == 2


@pytest.mark.parametrize(
    ("name", "said"), [("tiny", "served model"), ("tiny-alias", "served model"), ("a", "already loaded")]
)
async def test_a_name_in_use_already_exists(server: ControlServer, name: str, said: str) -> None:
    await server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path="org/a"))
    code, message = await refusal(server.call("LoadLora", pb.LoadLoraRequest(lora_name=name, source_path="org/b")))
    assert code is StatusCode.ALREADY_EXISTS
    assert said in message
    assert len(server.engine.utility_calls) == 1


async def test_one_name_loaded_twice_at_once_is_loaded_once(server: ControlServer) -> None:
    outcomes: list[str] = []

    async def load(source: str) -> None:
        try:
            await server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path=source))
            outcomes.append("OK")
        except RpcError as error:
            outcomes.append(error.code.name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, "org/a")
        nursery.start_soon(load, "org/b")
    assert sorted(outcomes) == ["ALREADY_EXISTS", "OK"]


@pytest.mark.parametrize("name", ["nope", "tiny"])
async def test_unloading_what_is_not_loaded_is_not_found(server: ControlServer, name: str) -> None:
    code, message = await refusal(server.call("UnloadLora", pb.UnloadLoraRequest(lora_name=name)))
    assert (code, message) == (StatusCode.NOT_FOUND, f"LoRA adapter {name!r} is not loaded")


@pytest.mark.parametrize("answers", [[False], [True, False], [None]])
async def test_an_adapter_that_one_engine_rejects_is_not_loaded(server: ControlServer, answers: list[Any]) -> None:
    server.answers["add_lora"] = answers
    code, message = await refusal(server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path="org/a")))
    assert code is StatusCode.INTERNAL
    assert "an engine rejected it" in message
    assert server.loras.resolve("a") is None


@pytest.mark.parametrize("answer", [[False], UtilityCallError("remove_lora", "it broke"), EngineUnavailableError("gone")])
async def test_an_adapter_that_an_engine_keeps_stays_loaded(server: ControlServer, answer: Any) -> None:
    await server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path="org/a"))
    server.answers["remove_lora"] = answer
    code, _ = await refusal(server.call("UnloadLora", pb.UnloadLoraRequest(lora_name="a")))
    assert code is (StatusCode.UNAVAILABLE if isinstance(answer, EngineUnavailableError) else StatusCode.INTERNAL)
    assert server.loras.resolve("a") is not None


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    tmp_path = tmp_path.resolve()
    (tmp_path / "allowed" / "good").mkdir(parents=True)
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path


async def test_a_local_path_under_an_allowed_prefix_is_loaded_resolved(nursery: trio.Nursery, adapters: Path) -> None:
    server = await serve_control(nursery, [ENGINE], lora_path_prefixes=[str(adapters / "allowed")])
    sources = ["allowed/good/", "elsewhere/../allowed/good", "allowed"]
    loaded = []
    for name, source in zip("abc", sources, strict=True):
        answer = await server.call("LoadLora", pb.LoadLoraRequest(lora_name=name, source_path=f"{adapters}/{source}"))
        loaded.append(answer.adapter.source_path.removeprefix(f"{adapters}/"))
    assert loaded == ["allowed/good", "allowed/good", "allowed"]


@pytest.mark.parametrize(
    "path", ["allowed/nope", "allowed/../elsewhere", "allowed/link", "allowed-not", "elsewhere", "nope"]
)
async def test_a_local_path_elsewhere_is_an_invalid_argument(nursery: trio.Nursery, adapters: Path, path: str) -> None:
    server = await serve_control(nursery, [ENGINE], lora_path_prefixes=[str(adapters / "allowed")])
    source = f"{adapters}/{path}"
    code, message = await refusal(server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path=source)))
    assert code is StatusCode.INVALID_ARGUMENT
    assert source in message
    assert server.engine.utility_calls == []


@pytest.mark.parametrize("path", ["./x", "../x", "~/x", "allowed/good"])
async def test_a_relative_local_path_is_an_invalid_argument(
    nursery: trio.Nursery, adapters: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapters)
    server = await serve_control(nursery, [ENGINE], lora_path_prefixes=[str(adapters)])
    code, message = await refusal(server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path=path)))
    assert code is StatusCode.INVALID_ARGUMENT
    assert "must be absolute" in message


@pytest.mark.parametrize("source", ["org/name", "name", "a/b/c", "https://host/x", "s3://bucket/key", "hf://x"])
async def test_what_is_no_local_path_goes_to_the_engine_as_it_is(server: ControlServer, source: str) -> None:
    await server.call("LoadLora", pb.LoadLoraRequest(lora_name="a", source_path=source))
    assert server.engine.utility_calls == [("add_lora", (["a", 1, source],))]


async def test_the_operator_may_load_from_anywhere(server: ControlServer) -> None:
    adapter = await server.service.loras.load_trusted("a", "/anywhere/at/all")
    assert server.loras.resolve("a") == adapter


# Discovery.


async def test_server_info_of_one_engine(server: ControlServer) -> None:
    info = await server.call("GetServerInfo", pb.GetServerInfoRequest())
    assert info == pb.ServerInfo(
        engine_version="0.33.0",
        api_version="vllm",
        instance_id="a",
        parallelism=pb.ParallelismInfo(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=2,
            data_parallel_size_local=1,
        ),
        max_model_len=4096,
        kv_block_size=16,
        total_kv_blocks=100,
        max_running_requests=10,
        max_batched_tokens=200,
        max_loras=2,
        rl_capabilities=pb.RlCapabilities(
            weight_transfer_enabled=True,
            weight_transfer_backend="nccl",
            sleep_mode_enabled=True,
            draft_weight_updates_enabled=True,
        ),
        effective_attention_block_size=16,
    )


async def test_several_engines_add_up_take_the_least_or_must_agree(nursery: trio.Nursery) -> None:
    other = replace(
        ENGINE,
        rank=1,
        instance_id="b",
        max_model_len=2048,
        num_gpu_blocks=70,
        max_num_seqs=7,
        effective_attention_block_size=32,
        weight_transfer_backend="ipc",
        enable_sleep_mode=False,
        supports_draft_weight_updates=False,
    )
    server = await serve_control(nursery, [ENGINE, other])
    info = await server.call("GetServerInfo", pb.GetServerInfoRequest())
    assert (info.max_model_len, info.total_kv_blocks) == (2048, 170)
    assert (info.instance_id, info.max_running_requests, info.kv_block_size) == ("a", 10, 16)
    assert (info.parallelism.data_parallel_size, info.parallelism.data_parallel_size_local) == (2, 2)
    assert info.rl_capabilities == pb.RlCapabilities()
    assert not info.HasField("effective_attention_block_size")
    for name, request in (("Sleep", pb.SleepRequest()), ("StartWeightUpdate", pb.StartWeightUpdateRequest())):
        assert (await refusal(server.call(name, request)))[0] is StatusCode.FAILED_PRECONDITION


async def test_server_info_before_any_engine_came(nursery: trio.Nursery) -> None:
    server = await serve_control(nursery, [])
    server.engine.set_capabilities(Capabilities(max_model_len=99))
    info = await server.call("GetServerInfo", pb.GetServerInfoRequest())
    assert (info.api_version, info.max_model_len, info.total_kv_blocks) == ("vllm", 99, 0)


async def test_model_info_names_the_model_and_its_aliases(server: ControlServer, bare: ControlServer) -> None:
    info = await server.call("GetModelInfo", pb.GetModelInfoRequest())
    assert info == pb.ModelInfo(
        model_id="org/tiny",
        served_model_name="tiny",
        served_model_aliases=["tiny-alias"],
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=True,
    )
    assert not (await bare.call("GetModelInfo", pb.GetModelInfoRequest())).supports_lora


async def test_kv_event_sources_are_the_engines_that_publish(nursery: trio.Nursery) -> None:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10,
        "hwm": 20,
        "max_queue_size": 30,
        "topic": "kv",
    }
    engines = [
        replace(ENGINE, rank=0, kv_events_config=config),
        replace(ENGINE, rank=1, kv_events_config={**config, "publisher": "null"}),
        replace(ENGINE, rank=2, kv_events_config={**config, "enable_kv_cache_events": False}),
        replace(ENGINE, rank=3, kv_events_config=None),
        replace(ENGINE, rank=4, kv_events_config={**config, "endpoint": "tcp://*:5561", "replay_endpoint": "tcp://*:6"}),
    ]
    server = await serve_control(nursery, engines)
    sources = (await server.call("GetKvEventSources", pb.GetKvEventSourcesRequest())).sources
    first = pb.KvEventSource(
        transport="zmq",
        endpoint="tcp://*:5557",
        topic="kv",
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
    )
    assert sources[0] == first
    assert [(s.data_parallel_rank, s.endpoint, s.replay_endpoint) for s in sources[1:]] == [(4, "tcp://*:5561", "tcp://*:6")]


# Requests and the server.


async def test_abort_ends_every_live_request_of_an_id_and_is_idempotent(server: ControlServer) -> None:
    with server.requests.track("x", ["1", "2"]), server.requests.track("x", ["3"]), server.requests.track("y", ["4"]):
        await server.call("Abort", pb.AbortRequest(request_ids=["x", "nope", "x", ""]))
    await server.call("Abort", pb.AbortRequest(request_ids=["x", "y"]))
    await server.call("Abort", pb.AbortRequest())
    assert server.engine.aborts == [["1", "2", "3"], [], []]


async def test_shutdown_is_answered_and_then_begins(server: ControlServer) -> None:
    assert await server.call("Shutdown", pb.ShutdownRequest()) == pb.ShutdownResponse()
    assert server.shutdowns == 1
