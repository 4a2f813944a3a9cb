"""Models for tests: one in plain Python whose every token depends on the whole history, and one for the ONNX seam."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trio_frontend.engine.base import EngineOutput, EngineRequest, FinishReason, OutputStream, SamplingParams
from trio_frontend.engine.embedded import LoadedModel
from trio_frontend.engine.embedded.session import KVCache

VOCAB = 48
GATE_TIMEOUT = 20.0
"""Seconds after which a gate that a broken test forgot opens with an error; no test waits for it."""


@functools.cache
def logits_after(history: tuple[int, ...]) -> np.ndarray:
    """The model: logits [VOCAB] after ``history``."""
    logits = np.random.default_rng(history).normal(0, 2, VOCAB).astype(np.float32)
    logits.setflags(write=False)
    return logits


def greedy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says after ``prompt``, the likeliest token each time."""
    history = tuple(prompt)
    for _ in range(count):
        history += (int(logits_after(history).argmax()),)
    return list(history[len(prompt) :])


class HistorySession:
    """A :class:`Session` whose cache holds the token ids themselves, so that any mix-up of rows or caches changes the answer.

    ``calls`` has (rows, new tokens, past length) of every run. With ``gate`` each run waits for one release of it;
    with ``error`` the next run raises it.
    """

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.gate: threading.Semaphore | None = None
        self.error: Exception | None = None

    def empty_cache(self, rows: int) -> KVCache:
        return KVCache([np.zeros((rows, 1, 0, 1), np.int64)], rows, 0)

    def run(self, token_ids: np.ndarray, cache: KVCache) -> np.ndarray:
        if self.gate is not None and not self.gate.acquire(timeout=GATE_TIMEOUT):
            raise TimeoutError("the test never opened the gate")
        if self.error is not None:
            raise self.error
        rows, new = token_ids.shape
        assert cache.rows == rows
        assert cache.arrays[0].shape == (rows, 1, cache.length, 1)
        self.calls.append((rows, new, cache.length))
        cache.arrays = [np.concatenate((cache.arrays[0], token_ids[:, None, :, None]), axis=2)]
        histories = cache.arrays[0][:, 0, :, 0]
        logits = [[logits_after(tuple(row[: cache.length + i + 1])) for i in range(new)] for row in histories.tolist()]
        cache.length += new
        return np.array(logits, np.float32)


def fake_model(session: HistorySession, max_batch_rows: int = 16, max_model_len: int = 4096) -> LoadedModel:
    return LoadedModel(session, max_model_len, (1,), Path("no-tokenizer.json"), max_batch_rows)


class FakeInference:
    """As much of ``onnxruntime.InferenceSession`` as is used, over a decoder with one layer that adds up what it has seen."""

    def __init__(
        self,
        *,
        ids: str = "tensor(int64)",
        past: str = "tensor(float)",
        optional: Sequence[str] = ("attention_mask", "position_ids"),
        extra_inputs: Sequence[str] = (),
        past_shape: Sequence[int | str] = ("batch", 2, "past", 4),
        presents: Sequence[str] = ("present.0.key", "present.0.value"),
        vocab: int | str = 10,
    ) -> None:
        pasts = ("past_key_values.0.key", "past_key_values.0.value")
        self._inputs = [SimpleNamespace(name=name, shape=["batch", "n"], type=ids) for name in ("input_ids", *optional)]
        self._inputs += [SimpleNamespace(name=name, shape=[], type="tensor(bool)") for name in extra_inputs]
        self._inputs += [SimpleNamespace(name=name, shape=list(past_shape), type=past) for name in pasts]
        self._outputs = [SimpleNamespace(name="logits", shape=["batch", "n", vocab], type=past)]
        self._outputs += [SimpleNamespace(name=name, shape=list(past_shape), type=past) for name in presents]
        self.feeds: list[dict[str, np.ndarray]] = []

    def get_inputs(self) -> list[Any]:
        return self._inputs

    def get_outputs(self) -> list[Any]:
        return self._outputs

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert names == ["logits", "present.0.key", "present.0.value"]
        self.feeds.append(feeds)
        past = feeds["past_key_values.0.key"]
        ids = feeds["input_ids"]
        new = np.broadcast_to(ids[:, None, :, None], (len(ids), 2, ids.shape[1], 4)).astype(past.dtype)
        present = np.concatenate((past, new), axis=2)
        sums = np.cumsum(present[:, 0, :, 0], axis=1)[:, -ids.shape[1] :]
        logits = (sums[:, :, None] + np.arange(10)).astype(past.dtype)
        return [logits, present, present.copy()]


def a_request(request_id: str, prompt: Sequence[int] = (2, 3), max_tokens: int = 8, **kwargs: Any) -> EngineRequest:
    """A request; keyword arguments named like a field of SamplingParams go there, ``priority`` and ``rank`` to the request."""
    priority = kwargs.pop("priority", 0)
    rank = kwargs.pop("rank", None)
    return EngineRequest(
        request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **kwargs), priority=priority, data_parallel_rank=rank
    )


class Collected:
    """All outputs of one request, joined."""

    def __init__(self, outputs: Sequence[EngineOutput]) -> None:
        self.outputs = list(outputs)
        self.token_ids = [token_id for output in outputs for token_id in output.token_ids]
        self.finish_reason: FinishReason | None = outputs[-1].finish_reason if outputs else None
        self.stop_reason = outputs[-1].stop_reason if outputs else None


async def collect(stream: OutputStream) -> Collected:
    return Collected([output async for batch in stream for output in batch])


async def generate(engine: Any, request: EngineRequest) -> Collected:
    async with engine.generate(request) as stream:
        return await collect(stream)
