"""A request becomes the ADD that vLLM's SamplingParams takes, or a ValueError: nothing that an engine would choke on is sent."""

from __future__ import annotations

import array
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from trio_frontend.engine.base import EngineInfo, EngineRequest, LoraRequest, SamplingParams, StructuredOutput
from trio_frontend.engine.vllm.add_request import encode_add

ENGINE = EngineInfo(max_model_len=2048, supports_lora=True, max_loras=1)
GREEDY = SamplingParams(max_tokens=7)


def encoded(request: EngineRequest, engine: EngineInfo = ENGINE) -> list[Any]:
    body = msgspec.msgpack.decode(encode_add(request, engine, client_index=2, arrival_time=5.5), strict=False)
    assert isinstance(body, list)
    return body


def request(**fields: Any) -> EngineRequest:
    return EngineRequest(**{"request_id": "r", "prompt_token_ids": [1, 2], "sampling": GREEDY, **fields})


def sampled(**fields: Any) -> dict[str, Any]:
    """The sampling_params of a request that has these fields."""
    params = encoded(request(sampling=replace(GREEDY, **fields)))[3]
    assert isinstance(params, dict)
    return params


NEUTRAL = {"max_tokens": 7, "temperature": 0.0, "detokenize": False, "output_kind": 1}


def test_the_fields_are_in_their_places() -> None:
    body = encoded(
        request(
            external_request_id="theirs",
            priority=-3,
            session_id="s",
            cache_salt="salt",
            lora=LoraRequest("adapter", 4, "/adapters/a"),
            data_parallel_rank=1,
            trace_headers={"traceparent": "00-1-2-01"},
        )
    )
    assert body == [
        "r",
        [1, 2],
        None,
        NEUTRAL,
        None,
        5.5,
        ["adapter", 4, "/adapters/a"],
        "salt",
        1,
        None,
        None,
        2,
        0,
        -3,
        {"traceparent": "00-1-2-01"},
        False,
        "theirs",
        None,
        None,
        False,
        "s",
    ]


def test_fields_that_are_unset_are_null() -> None:
    body = encoded(request())
    assert body[3] == NEUTRAL
    assert [body[index] for index in (2, 4, 6, 7, 8, 9, 10, 14, 16, 17, 18, 20)] == [None] * 12
    assert (body[11], body[13], body[15], body[19]) == (2, 0, False, False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 7}, {"min_tokens": 7}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 2.0, "top_k": 5, "top_p": 0.5, "min_p": 0.25}, {"top_k": 5, "top_p": 0.5, "min_p": 0.25}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -1}, {"seed": -1}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"presence_penalty": -2, "frequency_penalty": 2.0}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 0.1}, {"repetition_penalty": 0.1}),
        ({"logit_bias": {5: -100, 0: 1.5}}, {"logit_bias": {5: -100.0, 0: 1.5}}),
        ({"allowed_token_ids": (4, 5)}, {"allowed_token_ids": [4, 5]}),
        ({"logprobs": 0, "prompt_logprobs": -1}, {"logprobs": 0, "prompt_logprobs": -1}),
        ({"logprob_token_ids": [9, 3]}, {"logprob_token_ids": [9, 3]}),
        ({"logprob_token_ids": [9, 3], "logprobs": 2}, {"logprobs": 2}),
        ({"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": True}),
        (
            {"extra_args": {"kv_transfer_params": {"do_remote_decode": True, "port": 2**64 - 1}}},
            {"extra_args": {"kv_transfer_params": {"do_remote_decode": True, "port": 2**64 - 1}}},
        ),
    ],
)
def test_sampling_fields_keep_name_and_value(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = sampled(**fields)
    assert {name: params[name] for name in expected} == expected
    assert set(params) == {*NEUTRAL, *fields}


def test_numbers_that_vllm_wants_as_floats_are_floats() -> None:
    params = sampled(temperature=1, presence_penalty=1, logit_bias={3: 2})
    assert [type(params[name]) for name in ("temperature", "presence_penalty")] == [float, float]
    assert type(params["logit_bias"][3]) is float


# How a request ends, as SamplingParams.update_from_generation_config has it.


def test_the_first_eos_and_further_ones_go_where_vllm_looks_for_them() -> None:
    params = sampled(stop_token_ids=[8], eos_token_id=2, extra_eos_token_ids=[2, 5])
    assert params["_eos_token_id"] == 2
    assert params["stop_token_ids"] == [8, 5]
    assert set(params["_all_stop_token_ids"]) == {8, 2, 5}


def test_ignore_eos_leaves_every_eos_to_min_tokens_alone() -> None:
    params = sampled(stop_token_ids=[8], eos_token_id=2, extra_eos_token_ids=[5], ignore_eos=True)
    assert "_eos_token_id" not in params
    assert params["stop_token_ids"] == [8]
    assert set(params["_all_stop_token_ids"]) == {8, 2, 5}
    assert params["ignore_eos"] is True


def test_repeated_stop_ids_are_sent_once() -> None:
    params = sampled(stop_token_ids=[8, 8], eos_token_id=8, extra_eos_token_ids=[8, 9])
    assert params["stop_token_ids"] == [8, 9]
    assert sorted(params["_all_stop_token_ids"]) == [8, 9]


# Structured output.


@pytest.mark.parametrize("kind", ["json", "regex", "grammar", "structural_tag"])
@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_a_constraint_goes_with_its_backend(kind: Any, backend: str) -> None:
    assert sampled(structured_output=StructuredOutput(kind, "{}", backend))["structured_outputs"] == {
        kind: "{}",
        "_backend": backend,
    }


def test_json_object_is_a_flag() -> None:
    assert sampled(structured_output=StructuredOutput("json_object", None))["structured_outputs"] == {
        "json_object": True,
        "_backend": "xgrammar",
    }


def test_choice_is_a_grammar_for_xgrammar() -> None:
    constraint = StructuredOutput("choice", ("yes", 'a "quoted" \\ one', "tab\tand\nline", "\x00\x7f", "naïve 🙂", ""))
    assert sampled(structured_output=constraint)["structured_outputs"] == {
        "grammar": r'root ::= "yes" | "a \"quoted\" \\ one" | "tab\u0009and\u000aline" | "\u0000\u007f" | "naïve 🙂" | ""',
        "_backend": "xgrammar",
    }


@pytest.mark.parametrize("backend", ["guidance", "outlines"])
def test_choice_is_a_list_for_the_other_backends(backend: str) -> None:
    assert sampled(structured_output=StructuredOutput("choice", ("yes", "no"), backend))["structured_outputs"] == {
        "choice": ["yes", "no"],
        "_backend": backend,
    }


def test_an_empty_regex_is_one() -> None:
    assert sampled(structured_output=StructuredOutput("regex", ""))["structured_outputs"]["regex"] == ""


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutput("json", ""),
        StructuredOutput("grammar", "  "),
        StructuredOutput("structural_tag", ""),
        StructuredOutput("json", None),
        StructuredOutput("choice", ()),
        StructuredOutput("choice", ("a", 5)),  # type: ignore[arg-type]
        StructuredOutput("choice", "abc"),
        StructuredOutput("regex", "a\0b"),
        StructuredOutput("json", "{}", "no such backend"),
        StructuredOutput("xml", "<a/>"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_constraint_that_engines_fail_on_is_refused(constraint: StructuredOutput) -> None:
    with pytest.raises(ValueError, match=r"structured_output|choice"):
        sampled(structured_output=constraint)


# What is refused, by its name.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", None),
        ("max_tokens", 7.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 8),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1.5]),
        ("stop_token_ids", [2**31]),
        ("extra_eos_token_ids", ["a"]),
        ("eos_token_id", -1),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", -2),
        ("logprob_token_ids", []),
        ("logprob_token_ids", list(range(129))),
        ("extra_args", {"kv_transfer_params": {"n": 2**64}}),
        ("extra_args", {"kv_transfer_params": {1: "a key that is no string"}}),
        ("extra_args", {"o": object()}),
        ("extra_args", {"s": {1, 2}}),
    ],
)
def test_a_sampling_value_out_of_range_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        sampled(**{name: value})


def test_logprobs_beside_candidate_ids_must_be_their_number() -> None:
    with pytest.raises(ValueError, match="logprobs is 3 beside 2 logprob_token_ids"):
        sampled(logprobs=3, logprob_token_ids=[1, 2])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [1, -5]}, r"prompt_token_ids: Expected `int` >= 0 - at `\$\[1\]`"),
        ({"prompt_token_ids": [1, 2**31]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 2048}, "the prompt has 2048 tokens and leaves no room for one more in 2048"),
        ({"priority": 2**63}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"data_parallel_rank": 2**16}, "data_parallel_rank"),
        ({"lora": LoraRequest("", 1, "/a")}, "lora.name"),
        ({"lora": LoraRequest("a", 0, "/a")}, "lora.id"),
        ({"lora": LoraRequest("a", 1, "")}, "lora.path"),
        ({"request_id": "\ud800"}, "cannot be sent"),
    ],
)
def test_a_request_that_engines_fail_on_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        encoded(request(**fields))


def test_lora_is_refused_for_an_engine_without_it() -> None:
    with pytest.raises(ValueError, match="lora is 'a', and the engine has no LoRA"):
        encoded(request(lora=LoraRequest("a", 1, "/a")), EngineInfo(max_model_len=10))


def test_values_nested_too_deep_are_refused() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(ValueError, match="extra_args is nested deeper than 64 levels"):
        sampled(extra_args={"v": value})


def test_a_prompt_may_be_any_iterable_of_ints() -> None:
    for prompt in ((1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint16), array.array("i", [1, 2])):
        assert encoded(request(prompt_token_ids=prompt))[1] == [1, 2]


def test_the_longest_prompt_that_fits_is_sent() -> None:
    assert len(encoded(request(prompt_token_ids=[1] * 2047))[1]) == 2047
