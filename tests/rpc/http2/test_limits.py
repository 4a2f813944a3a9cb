"""Protects the knobs: values that cannot be kept are refused by name, and budgets fill with time."""

from __future__ import annotations

import pytest

from trio_frontend.rpc import http2
from trio_frontend.rpc.http2.budgets import Budget


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_concurrent_streams", -1),
        ("stream_window", 65_534),
        ("stream_window", 2**31),
        ("connection_window", 65_534),
        ("max_frame_size", 16_383),
        ("max_frame_size", 2**24),
        ("max_header_block", 0),
        ("max_continuations", -1),
        ("max_header_list_size", 0),
        ("header_cache_size", -1),
        ("max_unsent", -1),
        ("min_ping_interval", -0.1),
        ("max_ping_strikes", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        http2.Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resets", "settings", "empty_data", "window_updates", "ignored"])
def test_a_rate_out_of_range_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.burst is -1"):
        http2.Limits(**{name: http2.Rate(1.0, -1)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name}.per_second is -1"):
        http2.Limits(**{name: http2.Rate(-1.0, 1)})  # type: ignore[arg-type]


def spendable(budget: Budget, now: float) -> int:
    for count in range(1_000):
        try:
            budget.spend(now)
        except http2.ProtocolError:
            return count
    raise AssertionError("the budget has no end")


def test_an_empty_budget_says_what_there_was_too_much_of() -> None:
    with pytest.raises(http2.ProtocolError, match="ENHANCE_YOUR_CALM: too many of something"):
        Budget("of something", http2.Rate(1.0, 0)).spend(0.0)


def test_a_budget_allows_its_burst_and_then_its_rate() -> None:
    budget = Budget("of something", http2.Rate(10.0, 100))
    assert spendable(budget, 1e9) == 100
    assert spendable(budget, 1e9) == 0
    assert spendable(budget, 1e9 + 2.0) == 20
    assert spendable(budget, 1e9 + 1e6) == 100, "it never holds more than its burst"


def test_a_budget_can_be_earned_but_not_beyond_its_burst() -> None:
    budget = Budget("of something", http2.Rate(0.0, 10))
    assert spendable(budget, 0.0) == 10
    budget.earn(3)
    assert spendable(budget, 0.0) == 3
    budget.earn(1_000)
    assert spendable(budget, 0.0) == 10
