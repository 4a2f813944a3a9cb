"""Protects the seam to ONNX Runtime: what an exported decoder is fed, in which types, and which graphs are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.embedded.fakes import FakeInference
from trio_frontend.engine.embedded.session import DecoderSession, KVCache, SignatureError


def test_a_call_feeds_ids_mask_positions_and_the_cache_and_makes_it_longer() -> None:
    inference = FakeInference()
    session = DecoderSession(inference)
    cache = session.empty_cache(1)
    logits = session.run(np.array([[1, 2, 3]]), cache)
    assert logits.shape == (1, 3, 10)
    assert logits[0, :, 0].tolist() == [1, 3, 6]
    assert (cache.length, cache.rows) == (3, 1)
    assert session.run(np.array([[4]]), cache)[0, :, 0].tolist() == [10]
    feeds = inference.feeds[-1]
    assert feeds["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert feeds["position_ids"].tolist() == [[3]]
    assert feeds["past_key_values.0.key"].shape == (1, 2, 3, 4)
    assert cache.nbytes == 2 * (2 * 4 * 4) * 4


def test_rows_share_a_call() -> None:
    inference = FakeInference()
    session = DecoderSession(inference)
    cache = session.empty_cache(2)
    assert session.run(np.array([[1, 2], [5, 6]]), cache)[:, -1, 0].tolist() == [3, 11]
    assert inference.feeds[-1]["position_ids"].tolist() == [[0, 1], [0, 1]]
    assert inference.feeds[-1]["attention_mask"].tolist() == [[1, 1], [1, 1]]


def test_inputs_that_the_graph_does_not_have_are_not_fed() -> None:
    inference = FakeInference(optional=())
    DecoderSession(inference).run(np.array([[1]]), DecoderSession(inference).empty_cache(1))
    assert sorted(inference.feeds[-1]) == ["input_ids", "past_key_values.0.key", "past_key_values.0.value"]


def test_types_follow_the_graph_and_logits_are_always_float32() -> None:
    inference = FakeInference(ids="tensor(int32)", past="tensor(float16)")
    session = DecoderSession(inference)
    cache = session.empty_cache(1)
    logits = session.run(np.array([[1]]), cache)
    assert logits.dtype == np.float32
    assert cache.arrays[0].dtype == np.float16
    feeds = inference.feeds[-1]
    assert {feeds[name].dtype.name for name in ("input_ids", "attention_mask", "position_ids")} == {"int32"}


def test_a_vocabulary_that_the_graph_leaves_open_is_found_by_running_it() -> None:
    assert DecoderSession(FakeInference(vocab="vocab")).vocab_size == 10


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"extra_inputs": ["use_cache_branch"]}, "unknown inputs: use_cache_branch"),
        ({"past_shape": ["batch", "heads", "past", 4]}, "fixed heads and dim"),
        ({"past_shape": ["batch", 2, "past"]}, "fixed heads and dim"),
        ({"presents": ["present.0.key"]}, "no present.0.value"),
        ({"past": "tensor(bfloat16)"}, "bfloat16"),
    ],
)
def test_a_graph_that_is_no_such_decoder_is_refused_with_its_reason(graph: dict[str, Any], message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        DecoderSession(FakeInference(**graph))


def test_caches_are_joined_and_taken_apart_by_rows() -> None:
    session = DecoderSession(FakeInference())
    caches = []
    for token_id in (1, 2, 3):
        cache = session.empty_cache(1)
        session.run(np.array([[token_id, token_id]]), cache)
        caches.append(cache)
    joined = KVCache.concatenate(caches)
    assert (joined.rows, joined.length) == (3, 2)
    left = joined.select([0, 2])
    assert (left.rows, left.length) == (2, 2)
    assert session.run(np.array([[0], [0]]), left)[:, 0, 0].tolist() == [2, 6]


def test_rows_that_change_in_company_are_found_out() -> None:
    class Unsteady(FakeInference):
        def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            logits, *presents = super().run(names, feeds)
            if len(logits) >= 4:
                logits[-1, -1, 3] += np.spacing(logits[-1, -1, 3])
            return [logits, *presents]

    assert DecoderSession(FakeInference()).rows_are_independent(16, 100)
    assert not DecoderSession(Unsteady()).rows_are_independent(16, 100)
