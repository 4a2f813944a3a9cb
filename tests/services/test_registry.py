"""Protects Abort: an external id stands for exactly the live requests that have it."""

from __future__ import annotations

from trio_frontend.services.registry import RequestRegistry


def test_an_id_stands_for_its_requests_while_they_live() -> None:
    registry = RequestRegistry()
    with registry.track("x", ["1", "2"]):
        assert registry.internal_ids(["x"]) == ["1", "2"]
    assert registry.internal_ids(["x"]) == []
    assert len(registry) == 0


def test_two_live_requests_may_share_an_id() -> None:
    registry = RequestRegistry()
    first, second = registry.track("x", ["1"]), registry.track("x", ["2"])
    with second:
        with first:
            assert registry.internal_ids(["x"]) == ["1", "2"]
        assert registry.internal_ids(["x"]) == ["2"]
    assert len(registry) == 0


def test_a_request_is_named_once_however_often_its_id_is() -> None:
    registry = RequestRegistry()
    with registry.track("x", ["1"]), registry.track("y", ["2"]):
        assert registry.internal_ids(["y", "x", "x", "nope"]) == ["1", "2"]


def test_an_exception_forgets_the_request_too() -> None:
    registry = RequestRegistry()
    try:
        with registry.track("x", ["1"]):
            raise KeyError("x")
    except KeyError:
        assert len(registry) == 0


def test_a_request_of_no_sequences_leaves_others_of_its_id_alone() -> None:
    registry = RequestRegistry()
    empty = registry.track("x", [])
    with empty:
        with registry.track("x", ["1"]):
            assert registry.internal_ids(["x"]) == ["1"]
        assert registry.internal_ids(["x"]) == []
    assert len(registry) == 0
