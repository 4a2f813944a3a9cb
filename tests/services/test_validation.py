"""Protects that every value out of its range is refused by name, and that every value inside passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services import validation as v
from trio_frontend.services.errors import InvalidRequestError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, 1.0, 2.0])
def test_temperatures_that_pass(value: float) -> None:
    assert v.check_temperature(value) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (NAN, "temperature must be a finite number, got nan"),
        (INF, "temperature must be a finite number, got inf"),
        (-INF, "temperature must be a finite number, got -inf"),
        (-1.0, r"temperature must be in \[0, 2\], got -1"),
        (2.0001, r"temperature must be in \[0, 2\], got 2.0001"),
        (100.0, r"temperature must be in \[0, 2\], got 100"),
    ],
)
def test_temperatures_that_are_refused(value: float, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        v.check_temperature(value)


@given(value=st.floats(), least=st.integers(-2, 0), above=st.booleans())
def test_a_range_admits_what_is_inside_and_nothing_else(value: float, least: int, above: bool) -> None:
    inside = (least < value if above else least <= value) and value <= 2
    if inside:
        assert v.check_in_range("field", value, least, 2, above=above) == value
    else:
        with pytest.raises(InvalidRequestError, match=r"field must be in [(\[]"):
            v.check_in_range("field", value, least, 2, above=above)


def test_an_open_end_admits_everything_finite() -> None:
    assert v.check_in_range("p", 1e30, 0, INF, above=True) == 1e30
    for value in (INF, NAN, 0.0, -1.0):
        with pytest.raises(InvalidRequestError, match=r"p must be in \(0, inf\), got"):
            v.check_in_range("p", value, 0, INF, above=True)


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    assert v.check_token_ids("f", [0, 9], 10) == [0, 9]
    assert v.check_token_ids("f", [], 10) == []
    with pytest.raises(InvalidRequestError, match=r"token ids \[10, 99\] in f are outside the vocabulary: .* less than 10"):
        v.check_token_ids("f", [3, 10, 99], 10)


def test_a_message_does_not_grow_with_what_is_wrong() -> None:
    with pytest.raises(InvalidRequestError, match=r"and 9992 more") as caught:
        v.check_token_ids("f", range(10_000, 20_000), 10)
    assert len(str(caught.value)) < 300


def test_logit_bias_is_clamped() -> None:
    bias = {1: 101.0, 2: -INF, 3: INF, 4: 0.5}
    assert v.check_logit_bias(bias, 10) == {1: 100.0, 2: -100.0, 3: 100.0, 4: 0.5}
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[7\] must be a number, got nan"):
        v.check_logit_bias({7: NAN}, 10)
    with pytest.raises(InvalidRequestError, match=r"token ids \[10\] in decoding.logit_bias"):
        v.check_logit_bias({10: 1.0}, 10)


@pytest.mark.parametrize(("length", "left"), [(1, 63), (63, 1)])
def test_what_a_prompt_leaves(length: int, left: int) -> None:
    assert v.check_prompt_length(length, 64) == left


@pytest.mark.parametrize(
    ("length", "words"), [(0, "got none"), (64, "64 tokens.*64 tokens"), (3000, "3000 tokens.*64 tokens")]
)
def test_prompts_that_do_not_fit(length: int, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        v.check_prompt_length(length, 64)


@pytest.mark.parametrize(
    ("asked", "least", "default", "left", "expected"),
    [
        (0, 0, None, 10, (10, 0)),
        (0, 0, 7, 10, (7, 0)),
        (0, 0, 70, 10, (10, 0)),
        (3, 0, 7, 10, (3, 0)),
        (9, 0, 7, 10, (9, 0)),
        (5000, 10, None, 10, (10, 10)),
        (2, 2, None, 10, (2, 2)),
    ],
)
def test_most_and_least_new_tokens(
    asked: int, least: int, default: int | None, left: int, expected: tuple[int, int]
) -> None:
    assert v.check_new_tokens(asked, least, default, left) == expected


@pytest.mark.parametrize(("asked", "least"), [(2, 3), (0, 11), (5000, 11)])
def test_more_least_than_most_tokens_are_refused(asked: int, least: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"min_new_tokens must be at most the .*, got {least}"):
        v.check_new_tokens(asked, least, None, 10)


def test_truncation_reaches_as_far_as_the_context() -> None:
    assert v.check_truncation(64, 64) == 64
    with pytest.raises(InvalidRequestError, match=r"truncate_prompt_tokens must be at most .* 64 tokens, got 65"):
        v.check_truncation(65, 64)


def test_stop_strings() -> None:
    assert v.check_stop_strings(["a", "b"]) == ("a", "b")
    with pytest.raises(InvalidRequestError, match="stop_strings must not be empty"):
        v.check_stop_strings(["a", ""])
    with pytest.raises(InvalidRequestError, match="at most 65536 characters in all, got 65537"):
        v.check_stop_strings(["x" * 65_536, "y"])


def test_request_ids_have_a_bound_in_bytes() -> None:
    assert v.check_request_id("é" * 16_384) == "é" * 16_384
    with pytest.raises(InvalidRequestError, match="request_id must have at most 32768 bytes, got 32770"):
        v.check_request_id("é" * 16_385)


def ids(*token_ids: int) -> pb.CandidateTokens:
    return pb.CandidateTokens(token_ids=pb.TokenIds(ids=token_ids))


@pytest.mark.parametrize(
    ("candidates", "limit", "expected"),
    [
        (pb.CandidateTokens(), 20, (0, None)),
        (pb.CandidateTokens(top_n=0), 20, (0, None)),
        (pb.CandidateTokens(top_n=20), 20, (20, None)),
        (pb.CandidateTokens(top_n=21), -1, (21, None)),
        (pb.CandidateTokens(top_n=5000), -1, (-1, None)),
        (pb.CandidateTokens(all=True), -1, (-1, None)),
        (pb.CandidateTokens(all=True), 100, (-1, None)),
        (pb.CandidateTokens(all=False), 20, (0, None)),
        (ids(), 20, (0, None)),
        (ids(5, 99, 5), 0, (None, [5, 99, 5])),
        (ids(*range(100), *range(28)), 0, (None, [*range(100), *range(28)])),
    ],
)
def test_candidates(candidates: pb.CandidateTokens, limit: int, expected: v.Candidates) -> None:
    assert v.check_candidates("f", candidates, 100, limit) == expected


@pytest.mark.parametrize(
    ("candidates", "limit", "words"),
    [
        (pb.CandidateTokens(top_n=21), 20, "f.top_n must be at most the server's limit of 20 logprobs, got 21"),
        (pb.CandidateTokens(all=True), 99, "f.all must be at most the server's limit of 99 logprobs, got 100"),
        (pb.CandidateTokens(top_n=1), 0, "limit of 0"),
        (ids(100), -1, r"token ids \[100\] in f.token_ids"),
        (ids(*[5] * 129), -1, "f.token_ids must have at most 128 entries, got 129"),
    ],
)
def test_candidates_that_are_refused(candidates: pb.CandidateTokens, limit: int, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        v.check_candidates("f", candidates, 100, limit)


@pytest.mark.parametrize(("value", "rank"), [("0", 0), ("00", 0), ("+0", 0), ("4294967295", 4294967295)])
def test_data_parallel_ranks(value: str, rank: int) -> None:
    assert v.check_data_parallel_rank(value) == rank


@pytest.mark.parametrize("value", ["", "-0", "-1", "4294967296", "0x0", "abc", "1.0", "٣", b"0", "9" * 5000])
def test_data_parallel_ranks_that_are_none(value: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match="x-data-parallel-rank metadata must be an unsigned 32-bit integer"
    ) as caught:
        v.check_data_parallel_rank(value)
    assert len(str(caught.value)) < 200


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("parent", "state", "expected"),
    [
        (PARENT, None, {"traceparent": PARENT}),
        (PARENT, "a=1", {"traceparent": PARENT, "tracestate": "a=1"}),
        (PARENT, "x" * 513, {"traceparent": PARENT}),
        ("junk", "a=1", None),
        (None, "a=1", None),
        (PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), None, None),
        (PARENT.replace("00-", "ff-"), None, None),
    ],
)
def test_trace_headers(parent: Any, state: Any, expected: dict[str, str] | None) -> None:
    assert v.trace_headers(parent, state) == expected


RULES: list[Callable[[float], object]] = [
    v.check_temperature,
    lambda value: v.check_in_range("f", value, 0, 1),
    lambda value: v.check_logit_bias({1: value}, 10),
]


@pytest.mark.parametrize("rule", RULES)
def test_nan_passes_no_rule(rule: Callable[[float], object]) -> None:
    with pytest.raises(InvalidRequestError):
        rule(NAN)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            lambda: v.check_logit_bias(dict.fromkeys(range(11), 1.0), 10),
            "decoding.logit_bias must have at most 10 entries, got 11",
        ),
        (
            lambda: v.check_entries("stopping.stop_token_ids", 11, 10),
            "stopping.stop_token_ids must have at most 10 entries, got 11",
        ),
        (lambda: v.check_untruncated_length(2**20 + 1, 1024), "token_ids must have at most 1048576 entries, got 1048577"),
    ],
)
def test_what_has_too_many_entries_is_refused_by_their_number(check: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check()


def test_a_prompt_that_will_be_truncated_may_be_longer_than_the_context() -> None:
    v.check_untruncated_length(2**20, 1024)
    v.check_untruncated_length(4_000_000, 2_000_000)
