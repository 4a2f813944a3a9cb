"""Protects that unary, stream, fast path and plain path tell the same, and what a brute-force reading of the contract says."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.inference_rig import EOS, FakeCall, joined, make_rig, model, playing, request
from tests.text.families import family
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import EngineOutput, FinishReason
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.responses import encode_tokens

FAMILIES = ["byte_level", "llama_byte_fallback", "metaspace"]
"""Fast families; the slow one (a window of decoding) has its own tests in ``text``."""

token = st.one_of(st.integers(0, 440), st.integers(300, 420))
step_lists = st.lists(st.lists(token, min_size=1, max_size=4), min_size=1, max_size=10)
ends = st.sampled_from(["eos", "stop_token", "length", "abort", "empty_abort"])
stops = st.lists(st.sampled_from(["e", "th", " t", "\n", "er a", "the", "s", "世", "o", "ri"]), max_size=3)


def outputs_of(step_list: list[list[int]], end: str) -> list[EngineOutput]:
    outputs = [EngineOutput(step) for step in step_list]
    last = outputs[-1]
    match end:
        case "eos":
            last.token_ids = [*last.token_ids, EOS]
            last.finish_reason = FinishReason.STOP
        case "stop_token":
            last.finish_reason, last.stop_reason = FinishReason.STOP, last.token_ids[-1]
        case "length":
            last.finish_reason = FinishReason.LENGTH
        case "abort":
            last.finish_reason = FinishReason.ABORT
        case "empty_abort":
            outputs.append(EngineOutput([], finish_reason=FinishReason.ABORT))
    return outputs


def reference(
    name: str, prompt: list[int], message: pb.GenerateRequest, step_list: list[list[int]], end: str
) -> dict[str, Any]:
    """Text, ids and end of a sequence, by decoding every beginning of it whole."""
    tokenizer, stopping, response = family(name), message.stopping, message.response
    ids = [token_id for step in step_list for token_id in step]
    skip = response.skip_special_tokens if response.HasField("skip_special_tokens") else True
    whole_text = response.output_text if response.HasField("output_text") else True

    def decode(output: list[int]) -> str:
        return tokenizer.decode(prompt + output, skip_special_tokens=skip)[len(decoded_prompt) :]

    decoded_prompt = tokenizer.decode(prompt, skip_special_tokens=skip)
    spoken = [*ids, EOS] if end == "eos" else ids
    hidden = 1 if end in ("eos", "stop_token") and not stopping.include_stop_strings else 0
    visible = spoken[: len(spoken) - hidden]
    passed = len(decode(visible[: stopping.min_new_tokens]))
    for count in range(stopping.min_new_tokens + 1, len(visible) + 1):
        text = decode(visible[:count])
        for cut in range(passed + 1, len(text) + 1):
            for stop in stopping.stop_strings:
                if text[:cut].endswith(stop):
                    kept = text[:cut] if stopping.include_stop_strings else text[: cut - len(stop)]
                    return {"text": kept if whole_text else "", "ids": visible[:count], "end": ("stop_string", stop)}
    reason = {"eos": ("eos_token_id", EOS), "stop_token": ("stop_token_id", spoken[-1])}.get(end, (None, None))
    return {"text": decode(visible) if whole_text else "", "ids": spoken, "end": reason}


def summary(output: pb.SequenceOutput) -> dict[str, Any]:
    info = output.finish_info
    reason = info.WhichOneof("stop_reason")
    assert info.num_output_tokens == output.num_tokens == len(output.token_ids)
    return {
        "text": output.text,
        "ids": list(output.token_ids),
        "end": (reason, getattr(info, reason) if reason else None),
    }


requests: dict[str, Any] = {
    "step_list": step_lists,
    "end": ends,
    "stop_strings": stops,
    "include": st.booleans(),
    "min_tokens": st.integers(0, 4),
    "text": st.booleans(),
    "skip": st.booleans(),
    "interval": st.sampled_from([1, 1, 3]),
    "fast": st.lists(st.booleans(), max_size=10),
    "pace": st.sampled_from([0.0, 1.0]),
}
"""Everything that a request, its engine and its caller can differ in."""


def check_every_way(
    name: str,
    step_list: list[list[int]],
    end: str,
    stop_strings: list[str],
    include: bool,
    min_tokens: int,
    text: bool,
    skip: bool,
    interval: int,
    fast: list[bool],
    pace: float,
) -> None:
    prompt = family(name).encode("The fox")
    message = request(
        prompt,
        60 - len(prompt),
        stopping={"stop_strings": stop_strings, "include_stop_strings": include, "min_new_tokens": min_tokens},
        response={"output_text": text, "skip_special_tokens": skip},
    )
    expected = reference(name, prompt, message, step_list, end)

    async def main() -> None:
        config = ServerConfig(served_model_names=("tiny",), stream_interval=interval)
        rig = make_rig(config=config, files=model(name))
        async with playing(rig, lambda request: outputs_of(step_list, end), pace):
            unary = await rig.unary(message)
            # The fast path as it comes, never, and always; a caller that is slower than the engine.
            for call in (
                FakeCall(fast=iter(fast)),
                FakeCall(fast=iter([False] * 100)),
                FakeCall(),
                FakeCall(fast=iter([False] * 100), pace=2.5),
            ):
                messages = await rig.stream(message, call)
                assert messages[0].HasField("prompt_info")
                assert not messages[0].HasField("outputs")
                assert not any(later.HasField("prompt_info") for later in messages[1:])
                assert joined(messages) == unary.outputs
                assert messages[-1].outputs.HasField("finish_info")
        assert rig.engine.live_requests == 0
        assert summary(unary.outputs) == expected

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(**requests)
def test_every_way_to_the_caller_tells_what_the_reference_says(name: str, **drawn: Any) -> None:
    check_every_way(name, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=1000, deadline=None)
@given(**requests)
def test_long_run_every_way_tells_the_same(name: str, **drawn: Any) -> None:
    check_every_way(name, **drawn)


@given(
    index=st.integers(0, 2**32 - 1),
    text=st.text(max_size=200),
    count=st.integers(0, 2**32 - 1),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=50),
)
def test_the_message_written_by_hand_is_protobufs_byte_for_byte(index: int, text: str, count: int, ids: list[int]) -> None:
    message = pb.GenerateResponse(outputs=pb.SequenceOutput(index=index, text=text, num_tokens=count, token_ids=ids))
    assert encode_tokens(index, text, count, ids) == message.SerializeToString()


def test_long_messages_are_written_by_hand_too() -> None:
    for length in (127, 128, 16_383, 16_384, 70_000):
        message = pb.GenerateResponse(outputs=pb.SequenceOutput(text="é" * length, num_tokens=1, token_ids=[5] * length))
        assert encode_tokens(0, "é" * length, 1, [5] * length) == message.SerializeToString()


def test_a_known_token_goes_by_the_table_and_says_the_same() -> None:
    async def main() -> None:
        rig = make_rig()
        script = [EngineOutput([token_id]) for token_id in (300, 301, 300, 300, 301)]
        async with playing(rig, lambda request: [*script, EngineOutput([302], finish_reason=FinishReason.LENGTH)], 1.0):
            first, second = FakeCall(), FakeCall(fast=iter([False] * 20))
            await rig.stream(request(), first)
            await rig.stream(request(), second)
            assert first.sent == second.sent
            assert first.sent_fast == 5
            assert len(rig.service._messages.of(rig.engine.requests[0] and _options(), 0) or ()) == 2

    def _options() -> Any:
        from trio_frontend.services.conversion import OutputOptions

        return OutputOptions(token_ids=True)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
