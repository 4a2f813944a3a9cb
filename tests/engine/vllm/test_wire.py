"""What engines say is understood, from recorded messages of a real one to fields that do not exist yet; pickles never are."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.vllm.frames import Frame, frames, inline, message
from tests.engine.vllm.record import read
from trio_frontend.engine.vllm import wire


def recorded(name: str) -> list[wire.Outputs]:
    return [wire.decode_outputs(frames(*parts)) for parts in read(name)]


def recorded_outputs(name: str) -> list[tuple[wire.Output, list[Frame]]]:
    """Each output of the recording, with the frames of its message."""
    found = []
    for parts in read(name):
        received = frames(*parts)
        found += [(output, received) for output in wire.decode_outputs(received).outputs]
    return found


# Recorded from vLLM 0.32.0.


def test_a_real_handshake_is_understood() -> None:
    hello, ready_response, ready = read("handshake")
    assert wire.decode_handshake(frames(hello[1])[0]) == wire.HandshakeMessage("HELLO", local=False, headless=True)
    assert wire.decode_handshake(frames(ready[1])[0]).status == "READY"
    info = wire.decode_ready(frames(ready_response[1])[0], rank=0)
    assert (info.max_model_len, info.num_gpu_blocks, info.block_size, info.vllm_version) == (1024, 8192, 128, "0.32.0")
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.supports_lora) == (64, 2048, False)
    assert info.effective_attention_block_size == 128
    assert info.raw["kv_cache_size_tokens"] == 1048576


def test_real_plain_outputs_are_understood() -> None:
    outputs = [output for output, _ in recorded_outputs("plain")]
    assert [output.new_token_ids for output in outputs] == [[1337], [869], [106], [274], [452]]
    assert {output.request_id for output in outputs} == {"plain"}
    assert [output.finish_reason for output in outputs] == [None, None, None, None, 1]


def test_real_scheduler_stats_are_understood() -> None:
    first, *_, last = recorded("plain")
    assert first.scheduler_stats is not None
    assert first.scheduler_stats.num_running_reqs == 1
    assert 0 < first.scheduler_stats.kv_cache_usage < 1
    assert last.scheduler_stats is not None
    assert last.scheduler_stats.num_running_reqs == 0


@pytest.mark.parametrize(("name", "candidates"), [("logprobs", 3), ("large_logprobs", 20)])
def test_real_logprobs_are_understood(name: str, candidates: int) -> None:
    outputs = recorded_outputs(name)
    assert outputs
    for output, received in outputs:
        assert output.new_logprobs is not None
        lists = wire.logprobs_of(output.new_logprobs, received)
        assert lists.token_ids.shape == lists.logprobs.shape == (1, candidates + 1)
        assert lists.token_ids[0, 0] == output.new_token_ids[0]
        assert lists.token_ids[0, 1] == output.new_token_ids[0]  # greedy: the sampled token is the likeliest
        assert lists.ranks.tolist() == [1]
        assert lists.logprobs.dtype == np.float32
        assert (np.diff(lists.logprobs[0, 1:]) <= 0).all()


def test_real_prompt_logprobs_come_from_auxiliary_frames() -> None:
    ((output, received),) = recorded_outputs("prompt_logprobs")
    assert len(received) == 3
    assert output.new_prompt_logprobs_tensors is not None
    lists = wire.logprobs_of(output.new_prompt_logprobs_tensors, received)
    assert lists.token_ids.shape == lists.logprobs.shape == (39, 5)
    assert lists.token_ids[:, 0].tolist() == list(range(2, 41))  # the prompt was 1 to 40, and its first token has none
    assert lists.ranks.shape == (39,)
    assert (lists.logprobs <= 0).all()


def test_arrays_are_views_of_the_received_frames() -> None:
    ((output, received),) = recorded_outputs("prompt_logprobs")
    assert output.new_prompt_logprobs_tensors is not None
    lists = wire.logprobs_of(output.new_prompt_logprobs_tensors, received)
    assert np.shares_memory(lists.token_ids, np.frombuffer(received[1].buffer, np.uint8))
    assert not lists.token_ids.flags.writeable


def test_a_real_stop_token_is_named() -> None:
    output, _ = recorded_outputs("stop_token")[-1]
    assert (output.finish_reason, output.stop_reason) == (0, 654)


def test_a_real_utility_answer_is_understood() -> None:
    *_, answer = recorded("utility")
    assert answer.utility_output is not None
    assert (answer.utility_output.call_id, answer.utility_output.failure_message) == (1, None)
    assert wire.decode_utility_result(answer.utility_output.result) is False


def test_a_real_utility_failure_is_understood() -> None:
    (answer,) = recorded("utility_unknown")
    assert answer.utility_output is not None
    assert answer.utility_output.failure_message is not None
    assert "has no attribute 'no_such_method'" in answer.utility_output.failure_message


def test_real_ends_by_abort_and_error_are_understood() -> None:
    assert [output.finish_reason for output, _ in recorded_outputs("abort")] == [None, None, 2]
    ((output, _),) = recorded_outputs("error")
    assert (output.finish_reason, output.new_token_ids, output.error) == (3, [], None)


def test_the_dead_engines_last_frame_is_known() -> None:
    assert read("dead") == [[wire.ENGINE_CORE_DEAD]]


# What may come.

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(plain, max_size=4), st.lists(plain, max_size=4))
def test_further_fields_of_a_later_release_are_skipped(more_output: list[Any], more: list[Any]) -> None:
    output = ["r", [7], *[None] * 17, *more_output]
    outputs = wire.decode_outputs(message(0, [output], None, 1.0, None, None, None, None, "default", *more))
    assert outputs.outputs[0].new_token_ids == [7]


@given(st.dictionaries(st.text(max_size=8), plain, max_size=5))
def test_unknown_keys_of_maps_are_skipped(more: dict[str, Any]) -> None:
    stats = {**more, "num_running_reqs": 3}
    assert wire.decode_outputs(message(0, [], stats)).scheduler_stats.num_running_reqs == 3  # type: ignore[union-attr]
    ready = msgspec.msgpack.encode({**more, "max_model_len": 5})
    assert wire.decode_ready(frames(ready)[0], 3).max_model_len == 5
    hello = msgspec.msgpack.encode({**more, "status": "HELLO"})
    assert wire.decode_handshake(frames(hello)[0]).status == "HELLO"


@pytest.mark.parametrize("length", range(6))
def test_absent_trailing_fields_take_their_defaults(length: int) -> None:
    full = [2, [["r", [1]]], None, 1.5, None]
    outputs = wire.decode_outputs(message(*full[:length]))
    assert outputs.utility_output is None
    assert len(outputs.outputs) == (length >= 2)


def test_an_engine_stated_error_is_understood() -> None:
    error = {"code": "engine_paused", "message": "later", "retryable": True, "more": 1}
    (output,) = wire.decode_outputs(message(0, [["r", [], None, None, None, 3, *[None] * 12, error]])).outputs
    assert output.error == wire.RequestError("engine_paused", "later", True)


def test_transfer_params_of_any_shape_are_kept() -> None:
    params = {"remote_block_ids": [1, 2], "nested": {"host": "h", "port": 1.5}, "none": None}
    (output,) = wire.decode_outputs(message(0, [["r", [], None, None, None, 1, None, None, params, {"ec": 1}]])).outputs
    assert output.kv_transfer_params == params
    assert output.ec_transfer_params == {"ec": 1}


# What is refused.


@pytest.mark.parametrize("code", [1, 2])
def test_a_pickle_is_refused_where_it_would_be_used(code: int) -> None:
    pickled = msgspec.msgpack.Ext(code, b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(wire.WireError, match=f"extension type {code} is refused"):
        wire.decode_outputs(message(0, [["r", [1], None, None, None, 1, None, None, {"params": pickled}]]))
    with pytest.raises(wire.WireError, match=f"extension type {code} is refused"):
        wire.decode_outputs(message(0, [["r", [1], [pickled, pickled, pickled, None]]]))
    with pytest.raises(wire.WireError, match=f"extension type {code} is refused"):
        wire.decode_utility_result(msgspec.Raw(msgspec.msgpack.encode([None, pickled])))


@pytest.mark.parametrize("code", [1, 2, 99])
def test_an_extension_in_a_field_that_is_not_used_is_skipped_unread(code: int) -> None:
    strange = msgspec.msgpack.Ext(code, b"whatever")
    (output,) = wire.decode_outputs(message(0, [["r", [1], None, None, strange]])).outputs
    assert output.new_token_ids == [1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"ENGINE_CORE_DEAD and more",
        msgspec.msgpack.encode("a string"),
        msgspec.msgpack.encode({"outputs": []}),
        msgspec.msgpack.encode([0, [["r"]]]),
        msgspec.msgpack.encode([0, [[5, [1]]]]),
        msgspec.msgpack.encode([0, [["r", "tokens"]]]),
        msgspec.msgpack.encode([0, [["r", [1.5]]]]),
        msgspec.msgpack.encode([0, [], "stats"]),
        msgspec.msgpack.encode([0, [["r", [1]]]])[:-1],
        b"\x93\x00\x91\x92\xa2\xff\xfe\x90\xc0",  # a request id that is no UTF-8
        b"\x91" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_garbage_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_outputs(frames(body))


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_wire_error(body: bytes) -> None:
    for decode in (
        lambda: wire.decode_outputs(frames(body)),
        lambda: wire.decode_handshake(frames(body)[0]),
        lambda: wire.decode_ready(frames(body)[0], 0),
        lambda: wire.decode_utility_result(msgspec.Raw(body)),
    ):
        with contextlib.suppress(wire.WireError):
            decode()


IDS = np.array([[1, 2], [3, 4]], np.int32)
LOGPROBS = np.array([[-1, -2], [-3, -4]], np.float32)
RANKS = np.array([1, 2], np.int64)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [inline(IDS), inline(LOGPROBS)],
        [inline(IDS), inline(LOGPROBS), inline(RANKS[:1])],
        [inline(IDS), inline(LOGPROBS[:1]), inline(RANKS)],
        [inline(RANKS), inline(LOGPROBS), inline(RANKS)],
        [inline(IDS[:, :0]), inline(LOGPROBS[:, :0]), inline(RANKS)],
        [["<i4", [2, 2], b"too short"], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, -2], b""], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2**40, 2**40], b""], inline(LOGPROBS), inline(RANKS)],
        [["|O", [2, 2], bytes(32)], inline(LOGPROBS), inline(RANKS)],
        [["no dtype", [2, 2], bytes(16)], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, 2], 1], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, 2], 0], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, 2], -1], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, 2], None], inline(LOGPROBS), inline(RANKS)],
        [["<i4", [2, 2]], inline(LOGPROBS), inline(RANKS)],
        [None, None, None],
    ],
)
def test_logprobs_that_contradict_themselves_are_refused(value: list[Any]) -> None:
    received = message(0, [["r", [1, 2], value]])
    (output,) = wire.decode_outputs(received).outputs
    assert output.new_logprobs is not None
    with pytest.raises(wire.WireError):
        wire.logprobs_of(output.new_logprobs, received)


@pytest.mark.parametrize("names", [("<i4", "<f4", "<i8"), ("int32", "float32", "int64"), ("int32", "float32", "int32")])
def test_numpy_and_torch_names_of_types_are_both_known(names: tuple[str, str, str]) -> None:
    ranks = RANKS.astype(np.int32) if names[2] == "int32" else RANKS
    value = [inline(IDS, names[0]), inline(LOGPROBS, names[1]), inline(ranks, names[2]), None]
    received = message(0, [["r", [1, 2], value]])
    lists = wire.logprobs_of(wire.decode_outputs(received).outputs[0].new_logprobs, received)  # type: ignore[arg-type]
    assert (lists.token_ids == IDS).all()
    assert (lists.logprobs == LOGPROBS).all()
    assert lists.ranks.tolist() == [1, 2]


@pytest.mark.parametrize("data", [None, "text", True, 1.5, [1], {}])
def test_an_array_without_data_is_refused_and_no_memory_taken_for_it(data: Any) -> None:
    array = ["<i4", [2**40, 1], data]
    with pytest.raises(wire.WireError, match="array"):
        wire.logprobs_of([array, array, array], frames(b""))


def test_a_ready_response_without_a_context_length_is_refused() -> None:
    for body in ({}, {"max_model_len": 0}, {"max_model_len": "long"}, {"max_model_len": None}):
        with pytest.raises(wire.WireError):
            wire.decode_ready(frames(msgspec.msgpack.encode(body))[0], 0)


def test_the_answer_to_hello_is_what_engines_decode() -> None:
    assert msgspec.msgpack.decode(wire.encode_init(["tcp://a:1"], ["tcp://a:2"])) == {
        "addresses": {
            "inputs": ["tcp://a:1"],
            "outputs": ["tcp://a:2"],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        },
        "parallel_config": {},
    }
