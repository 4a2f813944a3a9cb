"""Protects the sampling rules: each against a slow reference that is written from its definition, and their order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_frontend.engine.base import SamplingParams
from trio_frontend.engine.embedded.sampling import (
    Sampler,
    SamplingError,
    TokenCounts,
    apply_penalties,
    draw,
    greedy,
    log_softmax,
    named_logprobs,
    survivors,
    top_logprobs,
)

INF = math.inf

some_logits = hnp.arrays(
    np.float32, st.integers(2, 40), elements=st.sampled_from([*(k / 4 for k in range(-20, 21)), -INF])
).filter(lambda logits: logits.max() > -INF)


def probabilities(logits: Any) -> list[float]:
    best = max(float(value) for value in logits)
    weights = [math.exp(float(value) - best) for value in logits]
    return [weight / sum(weights) for weight in weights]


def reference_survivors(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    left = {i: p for i, p in enumerate(probabilities(logits)) if logits[i] > -INF}
    best = max(left.values())
    left = {i: p for i, p in left.items() if p >= min_p * best * (1 - 1e-6)}
    if 0 < top_k < len(left):
        kth = sorted(left.values(), reverse=True)[top_k - 1]
        left = {i: p for i, p in left.items() if p >= kth * (1 - 1e-9)}
    if top_p < 1:
        total = sum(left.values())
        reached, worst = 0.0, 0.0
        for p in sorted(left.values(), reverse=True):
            reached, worst = reached + p, p
            if reached >= top_p * total * (1 - 1e-9):
                break
        left = {i: p for i, p in left.items() if p >= worst * (1 - 1e-9)}
    return set(left)


@settings(max_examples=150, deadline=None)
@given(
    some_logits, st.integers(0, 45), st.sampled_from([1.0, 0.97, 0.71, 0.333, 0.05]), st.sampled_from([0.0, 0.013, 0.3, 1.0])
)
def test_min_p_top_k_and_top_p_leave_what_their_definitions_leave(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    ids = survivors(logits.copy(), top_k, top_p, min_p)
    got = set(range(len(logits))) if ids is None else set(ids.tolist())
    assert {i for i in got if logits[i] > -INF} == reference_survivors(logits, top_k, top_p, min_p)


@settings(max_examples=40, deadline=None)
@given(some_logits)
def test_draws_at_evenly_spread_numbers_follow_the_softmax(logits: np.ndarray) -> None:
    count = 500
    drawn = np.bincount([draw(logits, i / count) for i in range(count)], minlength=len(logits)) / count
    assert np.abs(drawn - probabilities(logits)).max() <= 1.5 / count


def test_a_number_next_to_one_draws_the_last_possible_token() -> None:
    logits = np.array([0.0, 1.0, -INF, -INF], np.float32)
    assert draw(logits, math.nextafter(1.0, 0.0)) == 1


def test_zero_never_draws_what_is_ruled_out() -> None:
    logits = np.array([-INF, -INF, 0.0, 1.0], np.float32)
    assert draw(logits, 0.0) == 2


@settings(max_examples=100, deadline=None)
@given(
    some_logits,
    st.lists(st.integers(0, 1), max_size=4),
    st.lists(st.integers(0, 1), max_size=8),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 0.5, -1.5]),
    st.sampled_from([0.0, 0.25, -2.0]),
)
def test_penalties_change_seen_tokens_as_defined(
    logits: np.ndarray, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    counts = TokenCounts(len(logits), prompt)
    for token_id in output:
        counts.add(token_id)
    expected = []
    for token_id, value in enumerate(logits.tolist()):
        if token_id in prompt or token_id in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token_id)
        value -= presence * (token_id in output)
        expected.append(value)
    apply_penalties(logits, counts, repetition, frequency, presence)
    np.testing.assert_allclose(logits, expected, rtol=1e-5)


def test_counts_keep_every_distinct_token_when_they_outgrow_the_prompt() -> None:
    counts = TokenCounts(500, [7, 7, 8])
    for token_id in [*range(100, 300), *range(100, 300)]:
        counts.add(token_id)
    assert sorted(counts.seen.tolist()) == [7, 8, *range(100, 300)]
    assert counts.output[150] == 2
    assert counts.output[7] == 0


def rank(logits: np.ndarray, token_id: int) -> int:
    return int(sum(value >= logits[token_id] for value in logits))


@settings(max_examples=100, deadline=None)
@given(some_logits, st.integers(-1, 45), st.data())
def test_top_logprobs_are_the_token_then_the_likeliest_with_the_tokens_rank(
    logits: np.ndarray, k: int, data: st.DataObject
) -> None:
    token_id = data.draw(st.integers(0, len(logits) - 1))
    lists = top_logprobs(logits[None], np.array([token_id]), k)
    with np.errstate(divide="ignore"):
        expected = np.log(np.array(probabilities(logits)))
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: len(logits) if k < 0 else k]
    assert sorted(logits[lists.token_ids[0, 1:]].tolist()) == sorted(logits[best].tolist())
    assert lists.logprobs[0, 1:].tolist() == sorted(lists.logprobs[0, 1:].tolist(), reverse=True)
    assert lists.token_ids[0, 0] == token_id
    for value in set(lists.logprobs[0, 1:].tolist()):
        equals = lists.token_ids[0, 1:][lists.logprobs[0, 1:] == value].tolist()
        assert equals == sorted(equals)
    np.testing.assert_allclose(lists.logprobs[0], expected[lists.token_ids[0]], atol=1e-5)
    assert lists.ranks.tolist() == [rank(logits, token_id)]
    assert lists.logprobs.dtype == np.float32


def test_top_logprobs_of_many_rows_are_those_of_each_row() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (9, 50)).astype(np.float32)
    token_ids = np.arange(9)
    together = top_logprobs(logits, token_ids, 5)
    for row in range(9):
        alone = top_logprobs(logits[row : row + 1], token_ids[row : row + 1], 5)
        assert together.token_ids[row].tolist() == alone.token_ids[0].tolist()
        assert together.logprobs[row].tolist() == alone.logprobs[0].tolist()
        assert together.ranks[row] == alone.ranks[0]


def test_named_logprobs_keep_the_order_they_were_named_in() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (1, 50)).astype(np.float32)
    lists = named_logprobs(logits, np.array([7]), np.array([40, 3, 7]))
    assert lists.token_ids.tolist() == [[7, 40, 3, 7]]
    np.testing.assert_allclose(lists.logprobs[0], log_softmax(logits)[0, [7, 40, 3, 7]])
    assert lists.ranks.tolist() == [rank(logits[0], 7)]


def sampler(vocab: int = 16, prompt: tuple[int, ...] = (3,), stop_ids: tuple[int, ...] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(max_tokens=100, **params), prompt, vocab, stop_ids)


def ramp(vocab: int = 16) -> np.ndarray:
    """Logits that grow with the id."""
    return np.arange(vocab, dtype=np.float32)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert greedy(np.array([1, 5, 5, 2], np.float32)) == 1


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_temperature_below_the_threshold_is_greedy_whatever_the_seed(temperature: float) -> None:
    assert sampler(temperature=temperature, seed=5).pick(ramp()) == 15


def test_allowed_tokens_are_the_only_ones_picked() -> None:
    assert sampler(allowed_token_ids=[2, 9, 4]).pick(ramp()) == 9
    random = sampler(allowed_token_ids=[2, 9, 4], temperature=2.0, seed=1)
    assert {random.pick(np.zeros(16, np.float32)) for _ in range(200)} == {2, 4, 9}


def test_logit_bias_adds_to_the_logits_and_cannot_bring_back_what_is_not_allowed() -> None:
    assert sampler(logit_bias={4: 100.0}).pick(ramp()) == 4
    assert sampler(logit_bias={4: 100.0, 5: 3.0}, allowed_token_ids=[5, 6]).pick(ramp()) == 5


def test_what_could_end_the_request_is_not_picked_before_min_tokens() -> None:
    picker = sampler(min_tokens=2, stop_ids=(15, 14))
    assert [picker.pick(ramp()) for _ in range(4)] == [13, 13, 15, 15]


def test_before_min_tokens_a_grammar_that_allows_only_eos_may_still_end() -> None:
    only_eos = np.full(16, -np.inf, np.float32)
    only_eos[15] = 0.0
    assert sampler(min_tokens=2, stop_ids=(15,)).pick(only_eos.copy(), has_grammar=True) == 15
    with pytest.raises(SamplingError, match="no token"):
        sampler(min_tokens=2, stop_ids=(15,)).pick(only_eos.copy())


def test_penalties_count_what_was_picked() -> None:
    picker = sampler(frequency_penalty=1.5)
    assert [picker.pick(ramp()) for _ in range(4)] == [15, 14, 15, 13]
    picker = sampler(presence_penalty=2.5)
    assert [picker.pick(ramp()) for _ in range(5)] == [15, 14, 13, 15, 15]
    assert sampler(repetition_penalty=2.0, prompt=(15, 14)).pick(ramp()) == 13


def test_temperature_comes_before_min_p() -> None:
    # At temperature 10 the ramp's neighbours differ by a factor of exp(0.1): min_p 0.5 leaves seven of them.
    picker = sampler(temperature=10.0, min_p=0.5, seed=1)
    assert {picker.pick(ramp()) for _ in range(500)} == set(range(9, 16))


def test_a_top_k_of_one_is_greedy_at_any_temperature() -> None:
    picker = sampler(temperature=2.0, top_k=1, seed=3)
    assert {picker.pick(ramp()) for _ in range(50)} == {15}


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    def drawn(seed: int | None) -> list[int]:
        picker = sampler(temperature=1.0, seed=seed)
        return [picker.pick(np.zeros(16, np.float32)) for _ in range(40)]

    for seed in (0, 1, 7, -2, -(2**63), 2**63 - 1):
        assert drawn(seed) == drawn(seed)
    assert len({tuple(drawn(seed)) for seed in (0, 1, 2, -2, 2**63 - 1, -(2**63))}) == 6
    assert drawn(None) != drawn(None)
    assert drawn(-1) != drawn(-1)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}])
@pytest.mark.parametrize(("value", "message"), [(-np.inf, "no token"), (np.nan, "not finite")])
def test_logits_that_leave_nothing_to_pick_are_an_error(params: dict[str, Any], value: float, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        sampler(**params).pick(np.full(16, value, np.float32))


def test_a_number_that_is_none_among_others_is_an_error_too() -> None:
    logits = ramp()
    logits[3] = np.nan
    for params in ({}, {"temperature": 1.0}):
        with pytest.raises(SamplingError, match="not finite"):
            sampler(**params).pick(logits.copy())


def test_logprobs_of_the_sampler_are_those_asked_for() -> None:
    raw = ramp()
    assert sampler(logprobs=0).logprobs(raw, 3).token_ids.tolist() == [[3]]
    assert sampler(logprobs=2).logprobs(raw, 3).token_ids.tolist() == [[3, 15, 14]]
    assert sampler(logprobs=2, logprob_token_ids=[1, 0]).logprobs(raw, 3).token_ids.tolist() == [[3, 1, 0]]
    assert sampler(logprobs=-1).logprobs(raw, 3).token_ids.tolist() == [[3, *range(15, -1, -1)]]
    assert not sampler().wants_logprobs
    assert sampler(logprob_token_ids=[1]).wants_logprobs
