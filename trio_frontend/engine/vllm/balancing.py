"""Which of several data-parallel engines takes the next request. Pure; the clock is passed in.

An engine's load is the larger of what it reported last (running and waiting requests, other frontends' included) with what was
sent since, and what this frontend has in flight there, which is exact. Requests that wait at an engine weigh more the fuller its
KV cache is: a queue on a full cache drains slowly (as ``vllm.v1.engine.core_client.DPLBAsyncMPClient`` weighs them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from trio_frontend.engine.base import DataParallelRankError
from trio_frontend.engine.vllm.wire import SchedulerStats

__all__ = ["Balancer", "Load"]

REPORT_LIFETIME: Final = 2.0
"""Seconds for which a report counts. An engine that has work reports with every step; an old report is that of an idle engine."""


class Load:
    """What is known of one engine's load, in requests."""

    __slots__ = ("_reported_at", "running", "sent_since_report", "usage", "waiting")

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.usage = 0.0
        self.sent_since_report = 0
        self._reported_at = float("-inf")

    def report(self, stats: SchedulerStats, now: float) -> None:
        """The engine says what it has."""
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.usage = stats.kv_cache_usage
        self.sent_since_report = 0
        self._reported_at = now

    def score(self, in_flight: int, now: float) -> float:
        """The lower, the sooner this engine gets the next request. ``in_flight``: this frontend's own requests there."""
        if now - self._reported_at > REPORT_LIFETIME:
            return float(in_flight)
        reported = self.running + self.waiting + self.sent_since_report
        return max(reported, in_flight) + self.waiting * 6.0 * max(0.0, self.usage - 0.5)


class Candidate(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def load(self) -> Load: ...
    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Balancer:
    """Picks an engine; among equals each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, engines: Sequence[C], rank: int | None, now: float) -> C:
        """One of ``engines`` (at least one): that of ``rank`` (DataParallelRankError if it is not there), or the least loaded."""
        if rank is not None:
            for engine in engines:
                if engine.rank == rank:
                    return engine
            connected = ", ".join(str(engine.rank) for engine in sorted(engines, key=lambda e: e.rank))
            raise DataParallelRankError(f"there is no engine of data-parallel rank {rank}; connected: {connected or 'none'}")
        if len(engines) == 1:
            return engines[0]
        self._turn = (self._turn + 1) % len(engines)
        in_turn = (*engines[self._turn :], *engines[: self._turn])
        chosen = min(in_turn, key=lambda engine: engine.load.score(engine.in_flight, now))
        chosen.load.sent_since_report += 1
        return chosen
