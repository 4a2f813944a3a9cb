"""vLLM's own decoder takes every request that we encode, as it was meant; our decoder takes what vLLM's own encoder sends."""

from __future__ import annotations

import os
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.vllm.frames import frames
from tests.integration.real_engine import ENVIRONMENT, VLLM, require_vllm
from trio_frontend.engine.base import EngineInfo, EngineRequest, LoraRequest, SamplingParams, StructuredOutput
from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.add_request import encode_add

pytestmark = pytest.mark.real_engine

CODEC = Path(__file__).parents[1] / "engine" / "vllm" / "vllm_codec.py"
ENGINE = EngineInfo(max_model_len=4096, supports_lora=True)


def sampling_params(rng: random.Random) -> SamplingParams:
    """Any that may be sent, the ends of each range included."""

    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.5 else None

    def fields() -> dict[str, Any]:
        max_tokens = rng.choice([1, 16, 2**31 - 1])
        candidates = maybe(rng.sample(range(1000), rng.randint(1, 128)))
        return {
            "max_tokens": max_tokens,
            "min_tokens": rng.choice([0, max_tokens]),
            "temperature": rng.choice([0.0, 0.001, 1.0, 2.0]),
            "top_k": rng.choice([-1, 0, 1, 2**31 - 1]),
            "top_p": rng.choice([1e-6, 0.5, 1.0]),
            "min_p": rng.choice([0.0, 1.0]),
            "seed": rng.choice([None, 0, -1, -(2**63), 2**63 - 1]),
            "presence_penalty": rng.choice([-2.0, 0.0, 2.0]),
            "frequency_penalty": rng.choice([-2, 0, 2]),
            "repetition_penalty": rng.choice([1e-3, 1.0, 50.0]),
            "logit_bias": maybe({0: -100, 7: 100.0}),
            "allowed_token_ids": maybe([0, 2**31 - 1]),
            "stop_token_ids": rng.choice([(), (4,), [4, 5, 4]]),
            "eos_token_id": maybe(2),
            "extra_eos_token_ids": rng.choice([(), (2, 9)]),
            "ignore_eos": rng.random() < 0.5,
            "logprobs": None if candidates is not None else rng.choice([None, 0, 5, -1]),
            "logprob_token_ids": candidates,
            "prompt_logprobs": rng.choice([None, 0, 5, -1]),
            "structured_output": maybe(
                rng.choice(
                    [
                        StructuredOutput("json", '{"type": "object"}'),
                        StructuredOutput("regex", ""),
                        StructuredOutput("choice", ("a", '"\\\n')),
                        StructuredOutput("choice", ("a", "b"), "outlines"),
                        StructuredOutput("grammar", 'root ::= "a"', "guidance"),
                        StructuredOutput("json_object", None),
                        StructuredOutput("structural_tag", '{"type": "structural_tag"}'),
                    ]
                )
            ),
            "skip_reading_prefix_cache": rng.random() < 0.5,
            "extra_args": maybe({"kv_transfer_params": {"a": [1, -(2**63), 2**64 - 1, None, True, 1.5, "s", {"b": []}]}}),
        }

    return SamplingParams(**fields())


def requests() -> list[EngineRequest]:
    rng = random.Random(4)
    return [
        EngineRequest(
            f"r{number}",
            rng.choice([[1], [0, 2**31 - 1], list(range(4095))]),
            sampling_params(rng),
            external_request_id=rng.choice(["", "theirs"]),
            priority=rng.choice([0, -5, 2**31]),
            session_id=rng.choice([None, "s"]),
            cache_salt=rng.choice([None, "salt"]),
            lora=rng.choice([None, LoraRequest("adapter", 3, "/adapters/x")]),
            data_parallel_rank=rng.choice([None, 0, 3]),
            trace_headers=rng.choice([None, {"traceparent": "00-1-2-01"}]),
        )
        for number in range(300)
    ]


@cache
def vllm_says() -> dict[str, Any]:
    require_vllm()
    bodies = [encode_add(request, ENGINE, client_index=1, arrival_time=5.5) for request in requests()]
    ran = subprocess.run(
        [str(VLLM.parent / "python"), str(CODEC)],
        input=msgspec.msgpack.encode(bodies),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-4000:]
    result: dict[str, Any] = msgspec.msgpack.decode(ran.stdout)
    return result


def test_vllm_understands_every_request_as_it_was_meant() -> None:
    said = vllm_says()
    for request, found in zip(requests(), said["requests"], strict=True):
        assert found["request_id"] == request.request_id
        assert found["prompt_token_ids"] == request.prompt_token_ids
        assert found["client_index"] == 1
        assert found["arrival_time"] == 5.5
        for name in ("priority", "session_id", "cache_salt", "data_parallel_rank", "trace_headers"):
            assert found[name] == getattr(request, name), name
        assert found["external_req_id"] == (request.external_request_id or None)
        assert found["lora_request"] == (request.lora and [request.lora.name, request.lora.path])
        check_sampling(request.sampling, found["sampling_params"])


def check_sampling(asked: SamplingParams, found: dict[str, Any]) -> None:
    greedy = asked.temperature < 1e-5  # SamplingParams.__post_init__: greedy has no top_p, top_k, min_p; a little is 0.01
    assert found["temperature"] == (asked.temperature if greedy else max(asked.temperature, 0.01))
    assert found["top_k"] == (0 if greedy else asked.top_k)
    assert found["top_p"] == (1.0 if greedy else asked.top_p)
    assert found["min_p"] == (0.0 if greedy else asked.min_p)
    assert found["seed"] == (None if asked.seed == -1 else asked.seed)
    same = ("max_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    for name in (*same, "allowed_token_ids", "logprobs", "logprob_token_ids", "prompt_logprobs", "ignore_eos", "extra_args"):
        assert found[name] == getattr(asked, name), name
    assert (found["output_kind"], found["detokenize"], found["n"]) == ("DELTA", False, 1)
    eos = {*([] if asked.eos_token_id is None else [asked.eos_token_id]), *asked.extra_eos_token_ids}
    assert found["_all_stop_token_ids"] == sorted({*asked.stop_token_ids, *eos})
    assert found["_eos_token_id"] == (None if asked.ignore_eos else asked.eos_token_id)
    ending = set() if asked.ignore_eos else eos - {asked.eos_token_id}
    assert set(found["stop_token_ids"]) == {*asked.stop_token_ids, *ending}
    assert found["skip_reading_prefix_cache"] == (asked.skip_reading_prefix_cache or asked.prompt_logprobs is not None)
    constraint, sent = asked.structured_output, found["structured_outputs"]
    if constraint is None:
        assert sent is None
    else:
        kind = "grammar" if (constraint.kind, constraint.backend) == ("choice", "xgrammar") else constraint.kind
        assert sent["_backend"] == constraint.backend
        assert [
            name
            for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
            if sent[name] is not None
        ] == [kind]


def message(name: str) -> tuple[wire.Outputs, list[Any]]:
    received = frames(*vllm_says()["outputs"][name])
    return wire.decode_outputs(received), received


def test_plain_outputs_and_stats_of_vllms_encoder_are_understood() -> None:
    outputs, _ = message("plain")
    assert outputs.engine_index == 3
    first, second = outputs.outputs
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("a", [1], None)
    assert (second.new_token_ids, second.finish_reason, second.stop_reason) == ([2, 3], 0, 9)
    assert outputs.scheduler_stats == wire.SchedulerStats(4, 5, 0, 0.5)


@pytest.mark.parametrize(("name", "tokens", "candidates"), [("small logprobs", 1, 2), ("large logprobs", 3, 200)])
def test_logprobs_of_vllms_encoder_are_understood(name: str, tokens: int, candidates: int) -> None:
    outputs, received = message(name)
    assert len(received) == (1 if name == "small logprobs" else 3)
    lists = wire.logprobs_of(outputs.outputs[0].new_logprobs, received)  # type: ignore[arg-type]
    ids = np.arange(tokens * (candidates + 1)).reshape(tokens, candidates + 1)
    assert (lists.token_ids == ids).all()
    assert (lists.logprobs == -ids / 8).all()
    assert lists.ranks.tolist() == list(range(1, tokens + 1))


@pytest.mark.parametrize("name", ["prompt logprobs", "everything at once"])
def test_prompt_logprobs_of_vllms_encoder_are_understood(name: str) -> None:
    outputs, received = message(name)
    lists = wire.logprobs_of(outputs.outputs[0].new_prompt_logprobs_tensors, received)  # type: ignore[arg-type]
    assert lists.token_ids.shape == (40, 6)
    assert (lists.logprobs == -lists.token_ids / 8).all()


def test_an_output_with_everything_is_understood() -> None:
    outputs, _ = message("everything at once")
    (output,) = outputs.outputs
    assert output.finish_reason == 1
    assert output.kv_transfer_params == {"blocks": [1, 2], "host": "h"}
    assert output.ec_transfer_params == {"x": None}


def test_utility_answers_of_vllms_encoder_are_understood() -> None:
    outputs, _ = message("utility")
    assert outputs.utility_output is not None
    assert outputs.utility_output.call_id == 5
    assert wire.decode_utility_result(outputs.utility_output.result) == {"nested": [1, None, "x"]}
    failed, _ = message("utility failure")
    assert failed.utility_output is not None
    assert failed.utility_output.failure_message == "it failed"
