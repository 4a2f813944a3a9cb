"""One step of the model for all live sequences: a token for each that decodes, a chunk of prompt for some that wait for theirs.

Rules that hold here:

* Sequences of equal length share calls ("cohorts"): all advance by one token a step, so equal ones stay equal, and their
  caches are joined once, not at each step. Nothing is padded, so no sequence's numbers depend on its company.
* A prompt is cut into chunks at fixed places, whatever else runs: its numbers too depend on nothing but itself.
* A step is bounded: at most ``PREFILL_TOKENS`` of prompts, one chunk for each prompt, in turn.

``step`` runs in a worker thread; everything else is called while no step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from trio_frontend.engine.base import EngineError, EngineOutput
from trio_frontend.engine.embedded.guidance import GrammarError
from trio_frontend.engine.embedded.sampling import SamplingError
from trio_frontend.engine.embedded.sequence import FloatArray, Sequence
from trio_frontend.engine.embedded.session import KVCache, Session

__all__ = ["PREFILL_CHUNK", "PREFILL_TOKENS", "StepResult", "Stepper"]

PREFILL_CHUNK = 128
"""Prompt tokens in one call. Longer gains nothing on a small model and holds up the decoding of others."""

PREFILL_TOKENS = 256
"""Prompt tokens in one step, over all sequences."""

COHORT_BYTES = 16 * 2**20
"""Caches are joined up to this size: beyond, a call is bound by memory and company gains little (measured)."""

StepResult = tuple[Sequence, EngineOutput | EngineError]


class Cohort:
    """Sequences that decode in one call. Row i of ``cache`` is that of ``sequences[i]``."""

    __slots__ = ("cache", "sequences")

    def __init__(self, sequences: list[Sequence], cache: KVCache) -> None:
        self.sequences = sequences
        self.cache = cache


class Stepper:
    """The live sequences and their caches. ``max_rows``: how many sequences a call may have (1: each its own)."""

    def __init__(self, session: Session, max_rows: int) -> None:
        self._session = session
        self._max_rows = max_rows
        self._prefilling: deque[Sequence] = deque()
        self._cohorts: list[Cohort] = []

    def add(self, sequence: Sequence) -> None:
        self._prefilling.append(sequence)

    @property
    def sequences(self) -> Iterator[Sequence]:
        yield from self._prefilling
        for cohort in self._cohorts:
            yield from cohort.sequences

    @property
    def cached_sequences(self) -> int:
        """Rows of KV cache that are held now."""
        return sum(sequence.cache is not None for sequence in self._prefilling) + sum(c.cache.rows for c in self._cohorts)

    def drop_ended(self) -> None:
        """Free the caches of sequences that ended or are done."""
        if any(sequence.ended or sequence.done for sequence in self._prefilling):
            self._prefilling = deque(s for s in self._prefilling if not (s.ended or s.done))
        self._cohorts = [cohort for cohort in map(_without_ended, self._cohorts) if cohort is not None]

    def step(self) -> list[StepResult]:
        """Run the model once for everyone. What it returns is for Trio's thread to deliver. Raises what the session raises."""
        results: list[StepResult] = []
        self.drop_ended()
        self._join_cohorts()
        for cohort in self._cohorts:
            self._decode(cohort, results)
        self._prefill(results)
        self.drop_ended()
        return results

    def _decode(self, cohort: Cohort, results: list[StepResult]) -> None:
        token_ids = np.array([[sequence.last_token_id] for sequence in cohort.sequences], np.int64)
        logits = self._session.run(token_ids, cohort.cache)
        for row, sequence in enumerate(cohort.sequences):
            results.append((sequence, _next(sequence, logits[row, -1])))

    def _prefill(self, results: list[StepResult]) -> None:
        budget = PREFILL_TOKENS
        for _ in range(len(self._prefilling)):
            if budget <= 0:
                return
            sequence = self._prefilling.popleft()
            budget -= self._prefill_chunk(sequence, results)

    def _prefill_chunk(self, sequence: Sequence, results: list[StepResult]) -> int:
        start = sequence.computed_prompt_tokens
        chunk = sequence.prompt[start : start + PREFILL_CHUNK]
        if sequence.cache is None:
            sequence.cache = self._session.empty_cache(1)
        cache = sequence.cache
        logits = self._session.run(chunk[None], cache)[0]
        if sequence.wants_prompt_logprobs:
            sequence.add_prompt_logprobs(start, logits)
        if cache.length < len(sequence.prompt):
            self._prefilling.append(sequence)
            return len(chunk)
        results.append((sequence, _next(sequence, logits[-1])))
        sequence.cache = None
        self._cohorts.append(Cohort([sequence], cache))
        return len(chunk)

    def _join_cohorts(self) -> None:
        if self._max_rows == 1 or len(self._cohorts) < 2:
            return
        by_length: dict[int, list[Cohort]] = {}
        for cohort in self._cohorts:
            by_length.setdefault(cohort.cache.length, []).append(cohort)
        if len(by_length) < len(self._cohorts):
            self._cohorts = [joined for equals in by_length.values() for joined in self._joined(equals)]

    def _joined(self, equals: list[Cohort]) -> Iterable[Cohort]:
        if len(equals) == 1:
            return equals
        sequence_bytes = equals[0].cache.nbytes // equals[0].cache.rows
        most_rows = min(self._max_rows, COHORT_BYTES // max(1, sequence_bytes))
        joined: list[Cohort] = []
        group: list[Cohort] = []
        rows = 0
        for cohort in sorted(equals, key=lambda cohort: cohort.cache.rows):
            if group and rows + cohort.cache.rows > most_rows:
                joined.append(_join(group))
                group, rows = [], 0
            group.append(cohort)
            rows += cohort.cache.rows
        joined.append(_join(group))
        return joined


def _next(sequence: Sequence, logits: FloatArray) -> EngineOutput | EngineError:
    try:
        return sequence.next_output(logits)
    except (SamplingError, GrammarError) as error:
        sequence.done = True
        return EngineError(str(error))


def _join(cohorts: list[Cohort]) -> Cohort:
    if len(cohorts) == 1:
        return cohorts[0]
    return Cohort([s for cohort in cohorts for s in cohort.sequences], KVCache.concatenate([c.cache for c in cohorts]))


def _without_ended(cohort: Cohort) -> Cohort | None:
    left = [row for row, sequence in enumerate(cohort.sequences) if not (sequence.ended or sequence.done)]
    if len(left) == len(cohort.sequences):
        return cohort
    if not left:
        return None
    return Cohort([cohort.sequences[row] for row in left], cohort.cache.select(left))
