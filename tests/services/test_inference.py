"""Protects what a caller of Generate and GenerateStream gets, and when the engine is told to stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

from tests.services.inference_rig import EOS, Asked, FakeCall, byte_ids, joined, make_rig, model, playing, request, steps
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import (
    Capabilities,
    EngineError,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    FinishReason,
    LogprobsLists,
    LoraRequest,
)
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.rpc.status import StatusCode, StatusError
from trio_frontend.services.structs import mapping_of_struct
from trio_frontend.testing.engine import one_token_per_step

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def code_of(error: BaseException | None) -> StatusCode:
    """The status that rpc would make of a handler's error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StatusError)
    return error.code


def logprobs(rows: list[tuple[list[int], list[float], int]]) -> LogprobsLists:
    return LogprobsLists(
        np.array([ids for ids, _, _ in rows], np.int32),
        np.array([values for _, values, _ in rows], np.float32),
        np.array([rank for _, _, rank in rows], np.int32),
    )


# The shape of an answer.


async def test_a_unary_answer_has_the_prompt_the_text_the_ids_and_the_end() -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("abc"))) as rig:
        answer = await rig.unary(request([300, 301, 302]))
    assert answer == pb.GenerateResponse(
        prompt_info={"num_prompt_tokens": 3},
        outputs={
            "text": "abc",
            "num_tokens": 3,
            "token_ids": byte_ids("abc"),
            "finish_info": {"num_output_tokens": 3, "finish_reason": pb.FinishInfo.LENGTH},
        },
    )


async def test_a_stream_begins_with_the_prompt_alone_and_has_a_message_for_each_step(autojump_clock: Any) -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("abc")), 1.0) as rig:
        messages = await rig.stream(request())
    assert messages[0] == pb.GenerateResponse(prompt_info={"num_prompt_tokens": 2})
    assert [(m.outputs.text, m.outputs.num_tokens) for m in messages[1:]] == [("a", 1), ("b", 1), ("c", 1)]
    assert [m.outputs.HasField("finish_info") for m in messages[1:]] == [False, False, True]


async def test_the_prompt_is_told_before_the_engine_says_anything() -> None:
    rig, call = make_rig(), FakeCall()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.stream, request(response={"prompt_token_ids": True}), call)
        await rig.engine.next_request()
        await trio.testing.wait_all_tasks_blocked()
        assert call.messages == [pb.GenerateResponse(prompt_info={"num_prompt_tokens": 2, "token_ids": [300, 301]})]
        nursery.cancel_scope.cancel()


async def test_ids_and_text_are_given_only_if_wanted() -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("ab"))) as rig:
        bare = await rig.unary(pb.GenerateRequest(text="x"))
        assert (bare.outputs.text, list(bare.outputs.token_ids), bare.outputs.num_tokens) == ("ab", [], 2)
        neither = await rig.unary(pb.GenerateRequest(text="x", response={"output_text": False}))
        assert (neither.outputs.text, list(neither.outputs.token_ids), neither.outputs.num_tokens) == ("", [], 2)


async def test_special_tokens_are_skipped_unless_wanted() -> None:
    async with playing(make_rig(), lambda r: one_token_per_step([*byte_ids("a"), 0, *byte_ids("b")])) as rig:
        assert (await rig.unary(request())).outputs.text == "ab"
        assert (await rig.unary(request(response={"skip_special_tokens": False}))).outputs.text == "a<s>b"


async def test_a_character_that_is_never_completed_comes_out_at_the_end(autojump_clock: Any) -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("x世".encode()[:3])), 1.0) as rig:
        messages = await rig.stream(request())
    assert [m.outputs.text for m in messages[1:]] == ["x", "", "\ufffd"]


async def test_a_slow_caller_gets_several_steps_in_one_message_and_loses_none(autojump_clock: Any) -> None:
    ids = byte_ids("abcdefghijkl")
    async with playing(make_rig(), lambda r: one_token_per_step(ids), 1.0) as rig:
        messages = await rig.stream(request(max_new_tokens=20), FakeCall(fast=iter([False] * 99), pace=4.0))
    assert joined(messages).text == "abcdefghijkl"
    assert list(joined(messages).token_ids) == ids
    assert len(messages) < 7


async def test_a_stream_interval_gives_the_first_token_at_once_and_then_so_many(autojump_clock: Any) -> None:
    rig = make_rig(config=ServerConfig(stream_interval=3))
    async with playing(rig, lambda r: one_token_per_step(byte_ids("abcdefgh")), 1.0):
        messages = await rig.stream(request())
        plain = await rig.stream(request(), FakeCall(fast=iter([False] * 99)))
    assert [m.outputs.text for m in messages[1:]] == ["a", "bcd", "efg", "h"]
    assert messages == plain


async def test_steps_without_tokens_make_no_message(autojump_clock: Any) -> None:
    outputs = [EngineOutput(byte_ids("a")), EngineOutput([]), EngineOutput(byte_ids("b"), finish_reason=LENGTH)]
    async with playing(make_rig(), steps(*outputs), 1.0) as rig:
        assert [m.outputs.text for m in (await rig.stream(request()))[1:]] == ["a", "b"]


# How it ends.

ENDS: list[tuple[EngineOutput, dict[str, Any]]] = [
    (EngineOutput([EOS], finish_reason=STOP), {"finish_reason": "STOP", "eos_token_id": EOS}),
    (EngineOutput([400], finish_reason=STOP, stop_reason=400), {"finish_reason": "STOP", "stop_token_id": 400}),
    (EngineOutput([400], finish_reason=STOP, stop_reason="why"), {"finish_reason": "STOP", "stop_string": "why"}),
    (EngineOutput([], finish_reason=STOP), {"finish_reason": "STOP", "eos_token_id": byte_ids("a")[0]}),
    (EngineOutput([], finish_reason=LENGTH), {"finish_reason": "LENGTH"}),
    (EngineOutput([], finish_reason=ABORT), {"finish_reason": "ABORTED"}),
    (EngineOutput([], finish_reason=FinishReason.REPETITION), {"finish_reason": "ABORTED"}),
]


@pytest.mark.parametrize(("last", "expected"), ENDS)
async def test_each_end_is_told_in_both_ways(last: EngineOutput, expected: dict[str, Any], autojump_clock: Any) -> None:
    async with playing(make_rig(), steps(EngineOutput(byte_ids("a")), last), 1.0) as rig:
        info = pb.FinishInfo(num_output_tokens=1 + len(last.token_ids), **expected)
        assert (await rig.unary(request())).outputs.finish_info == info
        messages = await rig.stream(request())
        assert joined(messages).finish_info == info
        assert joined(messages).text == "a"


async def test_a_stop_tokens_text_is_left_out_unless_stop_strings_are_included() -> None:
    outputs = [EngineOutput(byte_ids("ab")), EngineOutput(byte_ids("cd"), finish_reason=STOP, stop_reason=byte_ids("d")[0])]
    async with playing(make_rig(), steps(*outputs)) as rig:
        plain = await rig.unary(request())
        assert (plain.outputs.text, list(plain.outputs.token_ids)) == ("abc", byte_ids("abcd"))
        assert (await rig.unary(request(stopping={"include_stop_strings": True}))).outputs.text == "abcd"


async def test_an_engines_transfer_parameters_come_back() -> None:
    last = EngineOutput([400], finish_reason=LENGTH, kv_transfer_params={"a": [1, "x"]}, ec_transfer_params={})
    async with playing(make_rig(), steps(last)) as rig:
        info = (await rig.unary(request())).outputs.finish_info
    assert mapping_of_struct("f", info.kv_transfer_params) == {"a": [1, "x"]}
    assert info.HasField("ec_transfer_params")


# Stop strings.


async def test_a_stop_string_ends_the_request_in_the_engine_before_the_last_message_is_sent(autojump_clock: Any) -> None:
    rig = make_rig()
    call = FakeCall(fast=iter([False] * 99), pace=5.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.stream, request(stopping={"stop_strings": ["bc"]}), call)
        handle = await rig.engine.next_request()
        handle.send(byte_ids("ab"))
        await trio.sleep(20)
        handle.send(byte_ids("cd"))
        sent = len(call.sent)
        await handle.closed.wait()
        assert handle.aborted.is_set()
        assert len(call.sent) == sent
    end = joined(call.messages)
    assert (end.text, list(end.token_ids), end.num_tokens) == ("a", byte_ids("abc"), 3)
    assert end.finish_info == pb.FinishInfo(num_output_tokens=3, finish_reason=pb.FinishInfo.STOP, stop_string="bc")


async def test_a_stop_string_ends_a_unary_request_while_it_runs() -> None:
    rig = make_rig()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            answer = await rig.unary(request(stopping={"stop_strings": ["bc"]}))
            assert (answer.outputs.text, answer.outputs.num_tokens) == ("a", 3)

        nursery.start_soon(ask)
        handle = await rig.engine.next_request()
        for token_id in byte_ids("abc"):
            await trio.testing.wait_all_tasks_blocked()
            handle.send([token_id])
        await handle.aborted.wait()


async def test_text_that_cannot_begin_a_stop_string_any_more_is_released(autojump_clock: Any) -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("abcxyz")), 1.0) as rig:
        messages = await rig.stream(request(stopping={"stop_strings": ["bcd"]}))
    assert [m.outputs.text for m in messages[1:]] == ["a", "", "", "bcx", "y", "z"]


async def test_stop_strings_count_only_after_the_least_number_of_tokens() -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("abcabc"))) as rig:
        answer = await rig.unary(request(stopping={"stop_strings": ["bc"], "min_new_tokens": 3}))
        assert (answer.outputs.text, answer.outputs.num_tokens) == ("abca", 6)
        answer = await rig.unary(request(stopping={"stop_strings": ["bc"], "min_new_tokens": 2}))
        assert (answer.outputs.text, answer.outputs.num_tokens) == ("a", 3)


async def test_stop_strings_work_without_text() -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("abcd"))) as rig:
        answer = await rig.unary(request(stopping={"stop_strings": ["bc"]}, response={"output_text": False}))
    assert (answer.outputs.text, answer.outputs.num_tokens, answer.outputs.finish_info.stop_string) == ("", 3, "bc")


async def test_a_newline_that_is_a_byte_token_ends_the_text_at_once() -> None:
    rig = make_rig(files=model("llama_byte_fallback"))
    newline = rig.service._model.tokenizer.token_to_id("<0x0A>")
    word = rig.service._model.tokenizer.encode("the")
    async with playing(rig, lambda r: one_token_per_step([*word, newline, newline, *word])):
        answer = await rig.unary(request(word, stopping={"stop_strings": ["\n\n"]}))
    assert (answer.outputs.text, answer.outputs.num_tokens) == (" the", len(word) + 2)


# Logprobs.


async def test_logprobs_stand_beside_their_tokens_also_when_steps_are_merged(autojump_clock: Any) -> None:
    a, b, c = byte_ids("abc")
    outputs = [
        EngineOutput([a], logprobs([([a, 7, 8], [-1.0, -2.0, -3.0], 4)])),
        EngineOutput([b, c], logprobs([([b, 9, 7], [-0.5, -0.25, -1.5], 1), ([c, 7, 9], [-4.0, -5.0, -6.0], 2)])),
        EngineOutput([EOS], logprobs([([EOS, 7, 8], [-7.0, -8.0, -9.0], 3)]), finish_reason=STOP),
    ]
    wanted = request(response={"output_logprobs": True, "output_candidates": {"top_n": 2}})
    async with playing(make_rig(), steps(*outputs), 1.0) as rig:
        unary = (await rig.unary(wanted)).outputs
        assert list(unary.logprobs) == [-1.0, -0.5, -4.0, -7.0]
        assert list(unary.ranks) == [4, 1, 2, 3]
        assert [[(t.id, t.logprob, t.rank) for t in tokens.tokens] for tokens in unary.candidate_tokens] == [
            [(7, -2.0, 1), (8, -3.0, 2)],
            [(9, -0.25, 1), (7, -1.5, 2)],
            [(7, -5.0, 1), (9, -6.0, 2)],
            [(7, -8.0, 1), (8, -9.0, 2)],
        ]
        for call in (FakeCall(), FakeCall(fast=iter([False] * 9), pace=3.0)):
            messages = await rig.stream(wanted, call)
            assert joined(messages) == unary
            for message in messages[1:]:
                out = message.outputs
                assert (
                    out.num_tokens == len(out.token_ids) == len(out.logprobs) == len(out.ranks) == len(out.candidate_tokens)
                )


async def test_logprobs_of_tokens_after_a_stop_string_are_dropped_with_them() -> None:
    a, b, c = byte_ids("abc")
    rows = [([token_id], [-1.0], 1) for token_id in (a, b, c)]
    async with playing(make_rig(), steps(EngineOutput([a, b, c], logprobs(rows)))) as rig:
        answer = await rig.unary(request(stopping={"stop_strings": ["b"]}, response={"output_logprobs": True}))
    assert list(answer.outputs.token_ids) == [a, b]
    assert len(answer.outputs.logprobs) == len(answer.outputs.ranks) == len(answer.outputs.candidate_tokens) == 2
    assert not answer.outputs.candidate_tokens[0].tokens


@pytest.mark.parametrize("delay", [0, 1])
async def test_prompt_logprobs_come_with_the_prompt(delay: int, autojump_clock: Any) -> None:
    of_prompt = logprobs([([301, 7], [-1.0, -2.0], 9), ([302, 8], [-3.0, -4.0], 1)])
    outputs = [
        *[EngineOutput([]) for _ in range(delay)],
        EngineOutput(byte_ids("a"), prompt_logprobs=of_prompt),
        EngineOutput(byte_ids("b"), finish_reason=LENGTH),
    ]
    wanted = request([300, 301, 302], response={"prompt_logprobs": True, "prompt_candidates": {"top_n": 1}})
    async with playing(make_rig(), steps(*outputs), 1.0) as rig:
        unary = await rig.unary(wanted)
        messages = await rig.stream(wanted)
    info = unary.prompt_info
    assert list(info.logprobs) == [0.0, -1.0, -3.0]
    assert list(info.ranks) == [0, 9, 1]
    assert [[(t.id, t.logprob, t.rank) for t in tokens.tokens] for tokens in info.candidate_tokens] == [
        [],
        [(7, -2.0, 1)],
        [(8, -4.0, 1)],
    ]
    assert messages[0] == pb.GenerateResponse(prompt_info=info)
    assert joined(messages) == unary.outputs


async def test_a_prompt_of_one_token_has_the_logprob_zero_and_waits_for_nothing(autojump_clock: Any) -> None:
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("ab")), 1.0) as rig:
        messages = await rig.stream(request([300], response={"prompt_logprobs": True}))
    assert messages[0].prompt_info == pb.PromptInfo(num_prompt_tokens=1, logprobs=[0.0], ranks=[0], candidate_tokens=[{}])
    assert joined(messages).text == "ab"


# Several sequences.


async def test_several_sequences_come_in_one_stream_each_with_its_index_and_end(autojump_clock: Any) -> None:
    def script(r: EngineRequest) -> list[EngineOutput]:
        return list(one_token_per_step([300 + (r.sampling.seed or 0), 310, 311]))

    async with playing(make_rig(), script, 1.0) as rig:
        messages = await rig.stream(request(sampling={"num_sequences": 3, "seed": 40}))
    assert [message.HasField("prompt_info") for message in messages] == [True] + [False] * 9
    for index in range(3):
        whole = joined(messages, index)
        assert list(whole.token_ids) == [340 + index, 310, 311]
        assert whole.finish_info.num_output_tokens == 3


async def test_one_sequence_is_what_the_same_request_with_its_seed_gives() -> None:
    def script(r: EngineRequest) -> list[EngineOutput]:
        return list(one_token_per_step([300 + (r.sampling.seed or 0)]))

    async with playing(make_rig(), script) as rig:
        several = await rig.stream(request(sampling={"num_sequences": 2, "seed": 4}))
        alone = await rig.stream(request(sampling={"seed": 5}))
    assert joined(several, 1).token_ids == joined(alone).token_ids


@pytest.mark.parametrize("failing", [0, 1])
async def test_the_failure_of_one_sequence_ends_all(failing: int) -> None:
    rig, call, asked = make_rig(), FakeCall(), Asked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked.run, rig.stream, request(sampling={"num_sequences": 2}), call)
        handles = sorted([await rig.engine.next_request() for _ in range(2)], key=lambda h: h.request.request_id)
        handles[0].send(byte_ids("a"))
        await trio.testing.wait_all_tasks_blocked()
        handles[failing].fail()
    assert code_of(asked.error) is StatusCode.INTERNAL
    assert all(handle.closed.is_set() for handle in handles)
    assert handles[1 - failing].aborted.is_set()
    assert not any(message.outputs.HasField("finish_info") for message in call.messages)


async def test_an_abort_by_the_callers_id_ends_all_sequences_with_ok() -> None:
    rig, call = make_rig(), FakeCall()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.stream, request(request_id="mine", sampling={"num_sequences": 2}), call)
        for _ in range(2):
            (await rig.engine.next_request()).send(byte_ids("a"))
        await trio.testing.wait_all_tasks_blocked()
        rig.engine.abort(rig.registry.internal_ids(["mine"]))
    for index in range(2):
        assert joined(call.messages, index).finish_info.finish_reason == pb.FinishInfo.ABORTED
    assert len(rig.registry) == 0


async def test_unary_has_one_slot_and_says_where_several_go() -> None:
    with pytest.raises(StatusError, match=r"num_sequences must be 1 for Generate.*use GenerateStream") as caught:
        await make_rig().unary(request(sampling={"num_sequences": 2}))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


# Failures.

FAILURES: list[tuple[EngineError, StatusCode, str]] = [
    (EngineError(), StatusCode.INTERNAL, "engine failed during generation"),
    (EngineError("too long", code="validation_error"), StatusCode.INVALID_ARGUMENT, "too long"),
    (EngineError("busy", code="overloaded", retryable=True), StatusCode.UNAVAILABLE, "busy"),
    (EngineError("odd", code="other"), StatusCode.INTERNAL, "odd"),
]


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("error", "code", "words"), FAILURES)
async def test_an_engines_error_ends_the_call_after_what_was_delivered(
    error: EngineError, code: StatusCode, words: str, partial: bool, autojump_clock: Any
) -> None:
    before: list[Any] = [EngineOutput(byte_ids("a")), EngineOutput(byte_ids("b"))] if partial else []
    async with playing(make_rig(), lambda r: [*before, error], 1.0) as rig:
        with pytest.raises(StatusError, match=words) as unary:
            await rig.unary(request())
        call = FakeCall()
        with pytest.raises(StatusError, match=words) as stream:
            await rig.stream(request(), call)
    assert unary.value.code is stream.value.code is code
    assert call.messages[0].HasField("prompt_info")
    assert joined(call.messages).text == ("ab" if partial else "")
    assert not any(message.outputs.HasField("finish_info") for message in call.messages)


async def test_what_an_interval_kept_back_is_delivered_before_an_error(autojump_clock: Any) -> None:
    rig, call = make_rig(config=ServerConfig(stream_interval=10)), FakeCall()
    async with playing(rig, lambda r: [*[EngineOutput([t]) for t in byte_ids("abcd")], EngineError()], 1.0):
        with pytest.raises(StatusError):
            await rig.stream(request(), call)
    assert joined(call.messages).text == "abcd"


async def test_a_failure_is_logged_once_with_both_ids(caplog: pytest.LogCaptureFixture) -> None:
    async with playing(make_rig(), lambda r: [EngineError("boom")]) as rig:
        with pytest.raises(StatusError):
            await rig.unary(request(request_id="mine"))
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.__dict__["request_id"] == "mine"
    assert record.__dict__["engine_request_id"] == rig.engine.requests[0].request.request_id
    assert record.__dict__["error"] == "boom"


async def test_an_engine_that_cannot_take_requests_is_unavailable_and_nothing_is_sent() -> None:
    rig, call = make_rig(), FakeCall()
    rig.engine.fail(EngineState.LOST, "gone")
    for ask in (rig.unary(request()), rig.stream(request(), call)):
        with pytest.raises(StatusError, match="gone") as caught:
            await ask
        assert caught.value.code is StatusCode.UNAVAILABLE
    assert call.sent == []


async def test_before_the_first_handshake_everything_is_unavailable() -> None:
    rig = make_rig(capabilities=Capabilities(max_model_len=0))
    with pytest.raises(StatusError, match="not ready") as caught:
        await rig.unary(request([5] * 100))
    assert caught.value.code is StatusCode.UNAVAILABLE


async def test_an_engine_that_fails_ends_the_requests_in_flight() -> None:
    rig, asked = make_rig(), Asked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked.run, rig.unary, request())
        await rig.engine.next_request()
        await trio.testing.wait_all_tasks_blocked()
        rig.engine.fail()
    assert code_of(asked.error) is StatusCode.INTERNAL


async def test_outputs_that_end_without_an_end_are_an_error_and_no_hang() -> None:
    rig, asked = make_rig(), Asked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked.run, rig.stream, request())
        handle = await rig.engine.next_request()
        handle.send(byte_ids("a"))
        await trio.testing.wait_all_tasks_blocked()
        handle.outputs._send.close()
    assert code_of(asked.error) is StatusCode.INTERNAL


@pytest.mark.parametrize("way", ["unary", "stream"])
async def test_a_caller_that_leaves_ends_the_request_while_no_token_flows(way: str) -> None:
    rig = make_rig()
    ask: Callable[..., Any] = rig.unary if way == "unary" else rig.stream
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, request(request_id="mine"))
        handle = await rig.engine.next_request()
        await trio.testing.wait_all_tasks_blocked()
        assert rig.registry.internal_ids(["mine"]) == [handle.request.request_id]
        nursery.cancel_scope.cancel()
    assert handle.aborted.is_set()
    assert rig.engine.live_requests == 0
    assert len(rig.registry) == 0


REFUSED: list[tuple[dict[str, Any], StatusCode, str]] = [
    ({"model": "other"}, StatusCode.NOT_FOUND, "other"),
    ({"prompt": []}, StatusCode.INVALID_ARGUMENT, "at least one token"),
    ({"prompt": ""}, StatusCode.INVALID_ARGUMENT, "at least one token"),
    ({"prompt": [5] * 64}, StatusCode.INVALID_ARGUMENT, "64"),
    ({"temperature": 9.0}, StatusCode.INVALID_ARGUMENT, "temperature"),
    ({"decoding": {"regex": "["}}, StatusCode.INVALID_ARGUMENT, "decoding.regex"),
    ({"lora_name": "x"}, StatusCode.FAILED_PRECONDITION, "x"),
    ({"media": [{"modality": 1, "url": "http://x/y"}]}, StatusCode.INVALID_ARGUMENT, "media"),
]


@pytest.mark.parametrize(("fields", "code", "words"), REFUSED)
async def test_what_is_refused_reaches_no_engine(fields: dict[str, Any], code: StatusCode, words: str) -> None:
    rig, call = make_rig(), FakeCall()
    for ask in (rig.unary(request(**fields)), rig.stream(request(**fields), call)):
        with pytest.raises(StatusError, match=words) as caught:
            await ask
        assert caught.value.code is code
    assert rig.engine.requests == []
    assert call.sent == []


async def test_a_prompt_is_required() -> None:
    with pytest.raises(StatusError, match="prompt is required"):
        await make_rig().unary(pb.GenerateRequest())


async def test_a_rank_that_is_not_there_is_the_callers_mistake() -> None:
    with pytest.raises(StatusError, match="rank 9") as caught:
        await make_rig().unary(request(), {"x-data-parallel-rank": "9"})
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


async def test_a_loaded_adapter_goes_with_the_request() -> None:
    rig = make_rig(capabilities=Capabilities(max_model_len=64, engines=(EngineInfo(),), supports_lora=True))
    rig.loras.add(LoraRequest("x", 1, "/path"))
    async with playing(rig, lambda r: one_token_per_step([300])):
        await rig.unary(request(lora_name="x"))
    assert rig.engine.requests[0].request.lora == LoraRequest("x", 1, "/path")


@pytest.mark.parametrize("name", ["", "tiny", "alias"])
async def test_a_model_has_several_names(name: str) -> None:
    async with playing(make_rig(), lambda r: one_token_per_step([300])) as rig:
        assert (await rig.unary(request(model=name))).outputs.num_tokens == 1


async def test_a_long_text_is_tokenized_beside_the_loop_and_means_the_same() -> None:
    rig = make_rig(capabilities=Capabilities(max_model_len=100_000, engines=(EngineInfo(),)))
    text = "The quick brown fox. " * 500
    async with playing(rig, lambda r: one_token_per_step([300])):
        await rig.unary(request(text))
    assert rig.engine.requests[0].request.prompt_token_ids == rig.service._model.tokenizer.encode(text)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    monkeypatch.setattr(type(rig.service._model.tokenizer), "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(StatusError, match=r"1000000 characters.*63 tokens") as caught:
        await rig.unary(request("x" * 1_000_000))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


async def test_a_text_far_longer_than_what_truncation_keeps_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig()
    monkeypatch.setattr(type(rig.service._model.tokenizer), "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(
        StatusError, match="at most 1048576 characters for a context length of 64 tokens, got 1048577"
    ) as caught:
        await rig.unary(request("a" * (2**20 + 1), truncate_prompt_tokens=5))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


async def test_prompts_are_tokenized_while_constraints_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    free, compiling = threading.Event(), trio.Event()

    def slow(_: object) -> None:
        trio.from_thread.run_sync(compiling.set)
        free.wait(20)

    monkeypatch.setattr("trio_frontend.services.structured_outputs.compile_constraint", slow)
    async with playing(make_rig(), lambda r: one_token_per_step(byte_ids("a"))) as rig, trio.open_nursery() as nursery:
        try:
            for number in range(8):
                nursery.start_soon(rig.unary, request(decoding={"regex": f"never seen before {number}"}))
            with trio.fail_after(10):
                await compiling.wait()
                answer = await rig.unary(request(" " * 3000, truncate_prompt_tokens=5))
        finally:
            free.set()
    assert answer.outputs.text == "a"


async def test_a_text_that_truncation_makes_fit_is_tokenized() -> None:
    rig = make_rig()
    async with playing(rig, lambda r: one_token_per_step([300])):
        answer = await rig.unary(request("The fox. " * 5_000, truncate_prompt_tokens=10))
    assert answer.prompt_info.num_prompt_tokens == 10


async def test_two_live_requests_may_share_an_id() -> None:
    rig = make_rig()
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(rig.unary, request(request_id="dup"))
        handles = [await rig.engine.next_request() for _ in range(2)]
        assert len(rig.registry.internal_ids(["dup"])) == 2
        for handle in handles:
            handle.send(byte_ids("a"), finish_reason=LENGTH)


async def test_the_config_may_say_other_defaults_than_the_model() -> None:
    rig = make_rig(config=ServerConfig(generation_defaults={"top_k": 3, "max_new_tokens": 2}))
    async with playing(rig, lambda r: one_token_per_step([300])):
        await rig.unary(pb.GenerateRequest(text="x"))
    sampling = rig.engine.requests[0].request.sampling
    assert (sampling.top_k, sampling.max_tokens) == (3, 2)


async def test_both_names_serve_the_same_methods() -> None:
    services = make_rig().service.services
    assert [service.name for service in services] == ["vllm.Inference", "vllm.Generate"]
    assert all(set(service.methods) == {"Generate", "GenerateStream"} for service in services)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"stopping": {"stop_token_ids": [5] * 1000, "max_new_tokens": 1}},
            r"stopping.stop_token_ids must have at most \d+ entries, got 1000",
        ),
        (
            {"decoding": {"allowed_token_ids": [5] * 1000}},
            r"decoding.allowed_token_ids must have at most \d+ entries, got 1000",
        ),
        (
            {"decoding": {"choice": {"choices": [""] * 300_000}}},
            "decoding.choice must have at most 262144 entries, got 300000",
        ),
        (
            {"kv": {"cache_salt": "s", "kv_transfer_params": {"ids": [1.0] * 100_000}}},
            "kv.kv_transfer_params must have at most 1048576 bytes",
        ),
    ],
)
async def test_lists_that_would_hold_up_the_loop_are_refused_by_their_length(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StatusError, match=words) as caught:
        await make_rig().unary(pb.GenerateRequest(token_ids={"ids": [300]}, **fields))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


async def test_a_prompt_of_millions_of_ids_is_refused_before_they_are_copied() -> None:
    for fields, words in (
        ({}, "no room for output"),
        ({"truncate_prompt_tokens": 5}, "token_ids must have at most 1048576 entries"),
    ):
        with pytest.raises(StatusError, match=words):
            await make_rig().unary(request([300] * (2**20 + 1), **fields))
