"""Protects every way a request can end: what its caller gets, and that the engine is told to stop exactly when it has to be."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.lifecycle.calls import (
    ControlStub,
    FinishInfo,
    InferenceStub,
    StatusCode,
    failure,
    generate,
    prompt,
    stream,
    streaming,
)
from trio_frontend.client import open_channel
from trio_frontend.engine.base import Capabilities, EngineError, EngineState, FinishReason
from trio_frontend.protos.vllm.control_pb2 import AbortRequest
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest
from trio_frontend.testing import Frontend, ScriptedEngine, open_frontend

H, E, BANG = 39, 36, 0  # the model's tokens for "H", "E" and "!"


# It finishes.


async def test_a_stream_that_reaches_its_length_ends_ok_and_the_engine_is_not_told_to_stop(channel, engine, nursery) -> None:
    outcome = await nursery.start(stream, channel)
    request = await engine.next_request()
    request.send([H])
    request.send([E], finish_reason=FinishReason.LENGTH)
    await outcome.ended.wait()
    assert (outcome.text, outcome.finish, outcome.status) == ("HE", FinishInfo.LENGTH, None)
    assert not request.aborted.is_set()


async def test_a_unary_call_that_finishes_ends_ok_and_the_engine_is_not_told_to_stop(channel, engine, nursery) -> None:
    async def answer() -> None:
        request = await engine.next_request()
        request.send([H])
        request.send([E], finish_reason=FinishReason.LENGTH)
        await request.closed.wait()
        assert not request.aborted.is_set()

    nursery.start_soon(answer)
    outcome = await generate(channel)
    assert (outcome.text, outcome.finish, outcome.status) == ("HE", FinishInfo.LENGTH, None)


async def test_a_stop_string_ends_the_stream_ok_and_the_engine_is_told_to_stop(channel, engine, nursery) -> None:
    outcome = await nursery.start(stream, channel, prompt(stop=("!",)))
    request = await engine.next_request()
    request.send([H])
    request.send([BANG])
    await outcome.ended.wait()
    assert (outcome.text, outcome.finish, outcome.status) == ("H", FinishInfo.STOP, None)
    assert request.aborted.is_set()


async def test_a_stop_string_ends_the_unary_call_ok_and_the_engine_is_told_to_stop(channel, engine, nursery) -> None:
    async def answer() -> None:
        request = await engine.next_request()
        request.send([H, BANG, E])
        await request.aborted.wait()

    nursery.start_soon(answer)
    outcome = await generate(channel, prompt(stop=("!",)))
    assert (outcome.text, outcome.finish) == ("H", FinishInfo.STOP)


# Its caller ends it.


async def test_a_caller_that_cancels_before_the_first_token_stops_the_engine_at_once(channel, engine) -> None:
    async with streaming(channel):
        request = await engine.next_request()
        await wait_all_tasks_blocked()
    await request.aborted.wait()
    assert request.outputs.finished


async def test_a_caller_that_cancels_between_tokens_stops_the_engine_while_none_flows(channel, engine) -> None:
    async with streaming(channel) as responses:
        request = await engine.next_request()
        await anext(responses)  # prompt_info
        request.send([H])
        assert (await anext(responses)).outputs.text == "H"
        await wait_all_tasks_blocked()
    await request.aborted.wait()


async def test_a_caller_that_cancels_a_unary_call_stops_the_engine(channel, engine, nursery) -> None:
    with trio.CancelScope() as scope:
        nursery.start_soon(_cancel_when_started, engine, scope)
        await InferenceStub(channel).Generate(prompt())
    assert scope.cancelled_caught
    await engine.requests[0].aborted.wait()


async def _cancel_when_started(engine: ScriptedEngine, scope: trio.CancelScope) -> None:
    request = await engine.next_request()
    request.send([H])
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_a_caller_that_cancels_one_of_two_calls_ends_only_that_one(channel, engine, nursery) -> None:
    kept = await nursery.start(stream, channel)
    first = await engine.next_request()
    async with streaming(channel):
        second = await engine.next_request()
    await second.aborted.wait()
    first.send([H], finish_reason=FinishReason.LENGTH)
    await kept.ended.wait()
    assert (kept.text, kept.status) == ("H", None)
    assert not first.aborted.is_set()


async def test_a_caller_that_cancels_n_sequences_stops_all_of_them(channel, engine) -> None:
    async with streaming(channel, prompt(n=3)):
        requests = [await engine.next_request() for _ in range(3)]
    for request in requests:
        await request.aborted.wait()


async def test_a_deadline_ends_a_stream_while_no_token_flows(channel, engine, autojump_clock) -> None:
    async with AsyncExitStack() as stack:
        # Ours ends with this block, so that what is read is the server's word and not our own.
        with trio.move_on_after(5):
            responses = await stack.enter_async_context(streaming(channel))
        request = await engine.next_request()
        await anext(responses)
        request.send([H])
        assert (await anext(responses)).outputs.text == "H"
        assert await failure(anext(responses)) is StatusCode.DEADLINE_EXCEEDED
    assert request.aborted.is_set()
    assert trio.current_time() < 6


async def test_a_deadline_ends_a_unary_call_and_the_engine_is_told_to_stop(channel, engine, autojump_clock) -> None:
    with trio.move_on_after(5) as scope:
        await InferenceStub(channel).Generate(prompt())
    assert scope.cancelled_caught
    await engine.requests[0].aborted.wait()


async def test_a_client_that_disconnects_stops_all_its_requests_while_no_token_flows(frontend, engine, nursery) -> None:
    connection = frontend.open_stream()
    async with open_channel(connection, "localhost") as channel:
        outcomes = [await nursery.start(stream, channel) for _ in range(3)]
        requests = [await engine.next_request() for _ in range(3)]
        await wait_all_tasks_blocked()
        await connection.aclose()
        for request in requests:
            await request.aborted.wait()
        for outcome in outcomes:
            await outcome.ended.wait()
            assert outcome.status is StatusCode.UNAVAILABLE
    await wait_all_tasks_blocked()
    assert frontend.server.running_handlers == 0


async def test_a_client_that_reads_nothing_holds_up_only_its_own_call_and_stops_the_engine_when_it_goes(
    frontend, engine, nursery
) -> None:
    engine.set_capabilities(Capabilities(max_model_len=3_000_000))
    async with frontend.connect() as channel, streaming(channel, prompt(max_tokens=2_000_000)) as responses:
        request = await engine.next_request()
        await anext(responses)
        # Twice what a stream's window takes, unread.
        for _ in range(200):
            request.send([H] * 10_000)
        await wait_all_tasks_blocked()
        assert frontend.server.running_handlers == 1
        async with frontend.connect() as other:
            outcome = await nursery.start(stream, other)
            (await engine.next_request()).send([H], finish_reason=FinishReason.LENGTH)
            await outcome.ended.wait()
        assert not request.aborted.is_set()
    await request.aborted.wait()


# The engine ends it.


@pytest.mark.parametrize("delivered", ["", "H"])
async def test_an_engine_error_ends_the_stream_with_internal_and_what_was_delivered_stays(
    channel, engine, nursery, delivered
) -> None:
    outcome = await nursery.start(stream, channel)
    request = await engine.next_request()
    if delivered:
        request.send([H])
        await wait_all_tasks_blocked()
    request.fail()
    await outcome.ended.wait()
    assert (outcome.text, outcome.finish, outcome.status) == (delivered, None, StatusCode.INTERNAL)
    assert outcome.message == "engine failed during generation"


@pytest.mark.parametrize("delivered", [False, True])
async def test_an_engine_error_ends_the_unary_call_with_internal(channel, engine, nursery, delivered) -> None:
    async def answer() -> None:
        request = await engine.next_request()
        if delivered:
            request.send([H])
        request.fail()

    nursery.start_soon(answer)
    outcome = await generate(channel)
    assert (outcome.text, outcome.finish, outcome.status) == ("", None, StatusCode.INTERNAL)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("busy", retryable=True), StatusCode.UNAVAILABLE),
        (EngineError("bad", code="validation_error"), StatusCode.INVALID_ARGUMENT),
        (EngineError("broken", code="other"), StatusCode.INTERNAL),
    ],
)
async def test_an_error_that_the_engine_states_is_passed_on(channel, engine, nursery, error, status) -> None:
    outcome = await nursery.start(stream, channel)
    (await engine.next_request()).fail(error)
    await outcome.ended.wait()
    assert (outcome.status, outcome.message) == (status, error.message)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.REPETITION])
async def test_an_abort_by_the_engine_ends_the_stream_ok_as_aborted(channel, engine, nursery, reason) -> None:
    outcome = await nursery.start(stream, channel)
    request = await engine.next_request()
    request.send([H])
    request.send([], finish_reason=reason)
    await outcome.ended.wait()
    assert (outcome.text, outcome.finish, outcome.status) == ("H", FinishInfo.ABORTED, None)


async def test_one_failed_sequence_of_several_ends_the_call_and_stops_the_others(channel, engine, nursery) -> None:
    outcome = await nursery.start(stream, channel, prompt(n=2))
    first, second = [await engine.next_request() for _ in range(2)]
    first.fail()
    await outcome.ended.wait()
    assert outcome.status is StatusCode.INTERNAL
    await second.aborted.wait()


async def test_an_engine_that_dies_ends_the_requests_in_flight_with_internal(channel, engine, nursery) -> None:
    outcomes = [await nursery.start(stream, channel) for _ in range(3)]
    for _ in outcomes:
        await engine.next_request()
    engine.fail(EngineState.LOST)
    for outcome in outcomes:
        await outcome.ended.wait()
        assert outcome.status is StatusCode.INTERNAL


# An operator ends it.


async def test_control_abort_ends_the_stream_ok_as_aborted_with_the_tokens_so_far(channel, engine, nursery) -> None:
    outcome = await nursery.start(stream, channel, prompt(request_id="mine"))
    request = await engine.next_request()
    request.send([H])
    await ControlStub(channel).Abort(AbortRequest(request_ids=["mine"]))
    await outcome.ended.wait()
    assert (outcome.text, outcome.finish, outcome.status) == ("H", FinishInfo.ABORTED, None)
    assert request.aborted.is_set()


async def test_control_abort_ends_every_request_of_that_id(channel, engine, nursery) -> None:
    outcomes = [await nursery.start(stream, channel, prompt(request_id="twice")) for _ in range(2)]
    requests = [await engine.next_request() for _ in outcomes]
    await ControlStub(channel).Abort(AbortRequest(request_ids=["twice"]))
    for outcome, request in zip(outcomes, requests, strict=True):
        await outcome.ended.wait()
        assert outcome.finish == FinishInfo.ABORTED
        assert request.aborted.is_set()


# It never begins.


async def test_an_invalid_request_is_refused_and_the_engine_never_hears_of_it(channel, engine) -> None:
    outcome = await generate(channel, prompt(temperature=3.0))
    assert outcome.status is StatusCode.INVALID_ARGUMENT
    assert "temperature" in outcome.message
    assert engine.requests == []


async def test_without_an_engine_a_request_is_unavailable(channel, engine) -> None:
    engine.set_health(EngineState.LOST, "connection lost")
    assert (await generate(channel)).status is StatusCode.UNAVAILABLE
    assert engine.requests == []


async def test_a_stalled_engine_still_takes_requests(channel, engine, nursery) -> None:
    engine.set_health(EngineState.STALLED)
    outcome = await nursery.start(stream, channel)
    (await engine.next_request()).send([H], finish_reason=FinishReason.LENGTH)
    await outcome.ended.wait()
    assert outcome.text == "H"


async def test_without_the_api_key_a_request_is_unauthenticated(engine, config) -> None:
    async with open_frontend(engine, config(api_keys=("right",))) as frontend:
        async with frontend.connect(metadata=[("authorization", "Bearer wrong")]) as channel:
            assert (await generate(channel)).status is StatusCode.UNAUTHENTICATED
        assert engine.requests == []
        async with frontend.connect(metadata=[("authorization", "Bearer right")]) as channel, streaming(channel):
            await engine.next_request()


async def test_an_unknown_service_is_unimplemented(channel) -> None:
    stub = InferenceStub(channel)
    stub._client.service_name = "vllm.Nothing"
    assert await failure(stub.Generate(prompt())) is StatusCode.UNIMPLEMENTED


async def test_a_failure_in_our_own_code_is_internal_and_ends_only_its_call(channel, engine, nursery, monkeypatch) -> None:
    from trio_frontend.services import inference

    other = await nursery.start(stream, channel)
    first = await engine.next_request()
    monkeypatch.setattr(inference, "convert", _broken)
    outcome = await generate(channel)
    assert outcome.status is StatusCode.INTERNAL
    assert "secret" not in outcome.message
    monkeypatch.undo()
    first.send([H], finish_reason=FinishReason.LENGTH)
    await other.ended.wait()
    assert other.text == "H"


def _broken(*_: object, **__: object) -> None:
    raise LookupError("a secret of our own")


async def test_no_handler_is_left_after_its_client_has_gone(frontend: Frontend, engine: ScriptedEngine) -> None:
    for _ in range(20):
        async with frontend.connect() as channel, streaming(channel, GenerateRequest(text="x")):
            await engine.next_request()
    await wait_all_tasks_blocked()
    assert frontend.server.running_handlers == 0
    assert engine.live_requests == 0
