"""Logits in, a token out: every rule of sampling as a function of numpy arrays, and the one class that orders them.

The rules and their order are vLLM's (``vllm/v1/sample/sampler.py``, logprobs_mode ``raw_logprobs``):

1. a grammar's mask; 2. logprobs are taken here; 3. allowed token ids; 4. min tokens, logit bias; 5. repetition, frequency,
presence penalty; 6. greedy if the temperature is below 1e-5; 7. temperature; 8. min_p; 9. top_k, top_p; 10. the draw.

A draw is the inverse of the cumulative distribution over token ids at one number of the request's own generator. So a
token depends on the request, its seed and its logits, and on nothing else that runs. Logits are float32 [vocab], and the
functions named ``apply_*`` change them in place. What is ruled out is -inf.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trio_frontend.engine.base import LogprobsLists, SamplingParams

__all__ = [
    "GREEDY_TEMPERATURE",
    "Sampler",
    "SamplingError",
    "TokenCounts",
    "apply_allowed_tokens",
    "apply_logit_bias",
    "apply_penalties",
    "apply_stop_mask",
    "draw",
    "greedy",
    "log_softmax",
    "named_logprobs",
    "survivors",
    "top_logprobs",
]

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the likeliest token is taken."""

_SEED_MASK = 2**64 - 1


class SamplingError(Exception):
    """No token can be picked: the constraints rule out all of them, or the model gave no numbers."""


class TokenCounts:
    """Which tokens a sequence has: ``seen`` in prompt or output (for repetition_penalty), ``output`` counts for the other two.

    Memory: 4 bytes per token of the vocabulary and 8 per distinct token seen, only for requests with a penalty.
    """

    __slots__ = ("_is_seen", "_seen", "_size", "output")

    def __init__(self, vocab_size: int, prompt_token_ids: npt.ArrayLike) -> None:
        self.output: FloatArray = np.zeros(vocab_size, np.float32)
        distinct = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._is_seen: BoolArray = np.zeros(vocab_size, np.bool_)
        self._is_seen[distinct] = True
        self._size = len(distinct)
        self._seen: IntArray = np.empty(max(64, 2 * self._size), np.int64)
        self._seen[: self._size] = distinct

    @property
    def seen(self) -> IntArray:
        """The distinct token ids of prompt and output, in no order."""
        return self._seen[: self._size]

    def add(self, token_id: int) -> None:
        self.output[token_id] += 1.0
        if not self._is_seen[token_id]:
            self._is_seen[token_id] = True
            if self._size == len(self._seen):
                self._seen = np.concatenate((self._seen, np.empty_like(self._seen)))
            self._seen[self._size] = token_id
            self._size += 1


def apply_allowed_tokens(logits: FloatArray, ruled_out: BoolArray) -> None:
    """Rule out every token whose entry in ``ruled_out`` [vocab] is true."""
    np.copyto(logits, -np.inf, where=ruled_out)


def apply_logit_bias(logits: FloatArray, token_ids: IntArray, biases: FloatArray) -> None:
    """Add ``biases`` to the logits of ``token_ids`` (distinct ids)."""
    logits[token_ids] += biases


def apply_stop_mask(logits: FloatArray, stop_ids: IntArray, restore: bool) -> None:
    """Rule out what would end the request, before min_tokens. ``restore``: not if nothing else is left (a grammar has ended)."""
    kept = logits[stop_ids]
    logits[stop_ids] = -np.inf
    if restore and logits.max() == -np.inf:
        logits[stop_ids] = kept


def apply_penalties(logits: FloatArray, counts: TokenCounts, repetition: float, frequency: float, presence: float) -> None:
    """repetition (1 is neutral) divides positive and multiplies negative logits of tokens of prompt and output;
    frequency and presence (0 is neutral) take off per occurrence, and once, for tokens of the output."""
    if repetition != 1.0:
        seen = counts.seen
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / np.float32(repetition), values * np.float32(repetition))
    if frequency != 0.0:
        logits -= np.float32(frequency) * counts.output
    if presence != 0.0:
        logits -= np.float32(presence) * (counts.output > 0)


def greedy(logits: FloatArray) -> int:
    """The likeliest token, the lowest id of several. Raises SamplingError if none is possible."""
    token_id = int(logits.argmax())
    best = logits[token_id]
    if not best > -np.inf:  # also if it is not a number
        raise _nothing_to_pick(logits)
    return token_id


def survivors(logits: FloatArray, top_k: int, top_p: float, min_p: float) -> IntArray | None:
    """The ids that min_p, top_k and top_p leave, ascending; None for all. ``logits`` are after temperature.

    min_p: at least ``min_p`` times as likely as the likeliest. top_k: the k likeliest (with those equal to the k-th; 0 for all).
    top_p: the likeliest, of what is left, that together reach ``top_p`` (with those equal to the last of them; at least one).
    """
    size = len(logits)
    threshold = -math.inf
    if min_p > 0.0:
        threshold = float(logits.max()) + math.log(min_p)
    if 0 < top_k < size:
        threshold = max(threshold, float(np.partition(logits, size - top_k)[size - top_k]))
    ids: IntArray | None = None
    if threshold > -math.inf:
        ids = np.flatnonzero(logits >= threshold)
    if top_p < 1.0:
        left = logits if ids is None else logits[ids]
        keep = left >= _top_p_threshold(left, top_p)
        ids = np.flatnonzero(keep) if ids is None else ids[keep]
    return ids


def _top_p_threshold(logits: FloatArray, top_p: float) -> np.float32:
    """The least logit that stays: the first, from the unlikeliest up, with which the sum exceeds 1 - ``top_p``."""
    best = logits.max()
    weights = np.exp(logits - best)
    total = weights.sum(dtype=np.float64)
    cut = (1.0 - top_p) * total
    # All that weigh less than a size-th of the cut are within it, whatever the rest: only the others need sorting.
    likely = weights > cut / len(weights)
    ordered = np.sort(logits[likely])
    weights = np.exp(ordered - best)
    reached = np.cumsum(weights, dtype=np.float64)
    reached += total - reached[-1]
    first = int(reached.searchsorted(cut, side="right"))
    threshold: np.float32 = ordered[min(first, len(ordered) - 1)]
    return threshold


def draw(logits: FloatArray, uniform: float) -> int:
    """The index at ``uniform`` (in [0, 1)) of the cumulative distribution of softmax(logits), by index.

    Raises SamplingError if no index is possible.
    """
    best = logits.max()
    if not -np.inf < best < np.inf:
        raise _nothing_to_pick(logits)
    cumulative = np.cumsum(np.exp(logits - best), dtype=np.float64)
    total = cumulative[-1]
    index = int(cumulative.searchsorted(uniform * total, side="right"))
    if index == len(cumulative):  # rounding took the product up to the total
        index = int(cumulative.searchsorted(total, side="left"))
    return index


def _nothing_to_pick(logits: FloatArray) -> SamplingError:
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return SamplingError("the model's logits are not finite")
    return SamplingError("the request's constraints leave no token to pick")


def log_softmax(logits: FloatArray) -> FloatArray:
    """Logprobs of logits [..., vocab]."""
    shifted: FloatArray = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    return shifted


def top_logprobs(logits: FloatArray, token_ids: IntArray, k: int) -> LogprobsLists:
    """Of logits [n, vocab]: the given token of each row [n], then its ``k`` likeliest (equal ones by id), and the token's rank.

    k is cut to the vocabulary, -1 means all of it. The rank counts the tokens that are at least as likely.
    """
    logprobs = log_softmax(logits)
    size = logprobs.shape[1]
    k = size if k < 0 else min(k, size)
    own = np.take_along_axis(logprobs, token_ids[:, None], 1)
    if k == 0:
        return _lists(token_ids[:, None], own, logprobs, own)
    if k < size:
        candidates = np.argpartition(logprobs, size - k, axis=1)[:, size - k :]
        candidates.sort(axis=1)  # so that the stable sort below puts the lower of two equal ids first
    else:
        candidates = np.broadcast_to(np.arange(size), logprobs.shape)
    values = np.take_along_axis(logprobs, candidates, 1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids = np.concatenate((token_ids[:, None], np.take_along_axis(candidates, order, 1)), axis=1)
    return _lists(ids, np.concatenate((own, np.take_along_axis(values, order, 1)), axis=1), logprobs, own)


def named_logprobs(logits: FloatArray, token_ids: IntArray, named: IntArray) -> LogprobsLists:
    """Of logits [n, vocab]: the given token of each row [n], then the ``named`` ids in their order, and the token's rank."""
    logprobs = log_softmax(logits)
    ids = np.concatenate((token_ids[:, None], np.broadcast_to(named, (len(token_ids), len(named)))), axis=1)
    values = np.take_along_axis(logprobs, ids, 1)
    return _lists(ids, values, logprobs, values[:, :1])


def _lists(ids: IntArray, values: FloatArray, logprobs: FloatArray, own: FloatArray) -> LogprobsLists:
    return LogprobsLists(ids.astype(np.int32), values, np.count_nonzero(logprobs >= own, axis=1))


class Sampler:
    """One request's way of picking tokens, with its generator and counts.

    ``stop_ids`` are all ids that may end the request; they are ruled out before min_tokens.
    """

    __slots__ = (
        "_bias",
        "_counts",
        "_greedy",
        "_named",
        "_params",
        "_plain",
        "_random",
        "_ruled_out",
        "_stop_ids",
        "picked",
    )

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], vocab_size: int, stop_ids: Iterable[int]
    ) -> None:
        self._params = params
        self.picked = 0
        self._greedy = params.temperature < GREEDY_TEMPERATURE
        self._ruled_out = _ruled_out(params.allowed_token_ids, vocab_size)
        self._bias = _bias(params.logit_bias)
        self._named = None if params.logprob_token_ids is None else np.asarray(params.logprob_token_ids, np.int64)
        self._stop_ids: IntArray | None = None
        if params.min_tokens > 0:
            self._stop_ids = np.unique(np.fromiter(stop_ids, np.int64))
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self._counts = TokenCounts(vocab_size, prompt_token_ids) if penalised else None
        # A seed of -1 means none (as to a vLLM engine); a float stream that Python guarantees to stay the same.
        seed = None if params.seed is None or params.seed == -1 else params.seed & _SEED_MASK
        self._random = None if self._greedy else random.Random(seed).random
        unchanged = self._ruled_out is None and self._bias is None and self._stop_ids is None and self._counts is None
        self._plain = self._greedy and unchanged

    @property
    def wants_logprobs(self) -> bool:
        return self._params.logprobs is not None or self._named is not None

    def pick(self, logits: FloatArray, has_grammar: bool = False) -> int:
        """The next token. ``logits`` [vocab] are used up. Raises SamplingError."""
        if self._plain:
            token_id = greedy(logits)
        else:
            self._apply_constraints(logits, has_grammar)
            token_id = greedy(logits) if self._random is None else self._draw(logits, self._random())
            if self._counts is not None:
                self._counts.add(token_id)
        self.picked += 1
        return token_id

    def logprobs(self, raw: FloatArray, token_id: int) -> LogprobsLists:
        """Logprobs of the picked token and the candidates that were asked for, of the raw logits [vocab]."""
        token_ids = np.array([token_id])
        if self._named is not None:
            return named_logprobs(raw[None], token_ids, self._named)
        assert self._params.logprobs is not None
        return top_logprobs(raw[None], token_ids, self._params.logprobs)

    def _apply_constraints(self, logits: FloatArray, has_grammar: bool) -> None:
        params = self._params
        if self._ruled_out is not None:
            apply_allowed_tokens(logits, self._ruled_out)
        if self._stop_ids is not None:
            if self.picked < params.min_tokens:
                apply_stop_mask(logits, self._stop_ids, has_grammar)
            else:
                self._stop_ids = None
        if self._bias is not None:
            apply_logit_bias(logits, *self._bias)
        if self._counts is not None:
            apply_penalties(
                logits, self._counts, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            )

    def _draw(self, logits: FloatArray, uniform: float) -> int:
        params = self._params
        if params.temperature != 1.0:
            logits *= np.float32(1.0 / params.temperature)
        if not -np.inf < logits.max() < np.inf:
            raise _nothing_to_pick(logits)
        ids = survivors(logits, params.top_k, params.top_p, params.min_p)
        return draw(logits, uniform) if ids is None else int(ids[draw(logits[ids], uniform)])


def _ruled_out(allowed: Sequence[int] | None, vocab_size: int) -> BoolArray | None:
    if allowed is None:
        return None
    ruled_out = np.ones(vocab_size, np.bool_)
    ruled_out[np.asarray(allowed, np.int64)] = False
    return ruled_out


def _bias(logit_bias: Mapping[int, float] | None) -> tuple[IntArray, FloatArray] | None:
    if not logit_bias:
        return None
    return np.fromiter(logit_bias.keys(), np.int64), np.fromiter(logit_bias.values(), np.float32)
