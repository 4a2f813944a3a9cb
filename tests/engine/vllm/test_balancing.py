"""The next of several engines is the one with least to do, by its own word and by what we sent it since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from trio_frontend.engine.base import DataParallelRankError
from trio_frontend.engine.vllm.balancing import Balancer, Load
from trio_frontend.engine.vllm.wire import SchedulerStats


@dataclass
class Engine:
    rank: int
    in_flight: int = 0
    load: Load = field(default_factory=Load)


def engines(count: int) -> list[Engine]:
    return [Engine(rank) for rank in range(count)]


def test_a_burst_is_spread_evenly_before_any_engine_has_reported() -> None:
    all_engines, balancer = engines(4), Balancer()
    for _ in range(40):
        balancer.pick(all_engines, None, now=1.0).in_flight += 1
    assert [engine.in_flight for engine in all_engines] == [10] * 4


def test_engines_with_equal_load_take_turns() -> None:
    balancer, all_engines = Balancer(), engines(3)
    assert Counter(balancer.pick(all_engines, None, now=1.0).rank for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_an_engine_that_is_busy_for_others_gets_less() -> None:
    busy, idle = engines(2)
    busy.load.report(SchedulerStats(num_running_reqs=5), now=1.0)
    idle.load.report(SchedulerStats(num_running_reqs=0), now=1.0)
    balancer = Balancer()
    assert [balancer.pick([busy, idle], None, now=1.1).rank for _ in range(5)] == [1] * 5


def test_what_was_sent_since_a_report_counts() -> None:
    first, second = engines(2)
    for engine in (first, second):
        engine.load.report(SchedulerStats(num_running_reqs=3), now=1.0)
    balancer = Balancer()
    assert Counter(balancer.pick([first, second], None, now=1.1).rank for _ in range(10)) == {0: 5, 1: 5}


def test_a_queue_on_a_full_cache_weighs_more_than_running_requests() -> None:
    queued, running = engines(2)
    queued.load.report(SchedulerStats(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=1.0), now=1.0)
    running.load.report(SchedulerStats(num_running_reqs=8, kv_cache_usage=0.9), now=1.0)
    assert Balancer().pick([queued, running], None, now=1.0).rank == 1
    queued.load.report(SchedulerStats(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=0.2), now=1.0)
    assert Balancer().pick([queued, running], None, now=1.0).rank == 0


def test_an_old_report_says_nothing() -> None:
    once_busy, loaded = engines(2)
    once_busy.load.report(SchedulerStats(num_running_reqs=50), now=1.0)
    loaded.in_flight = 1
    assert Balancer().pick([once_busy, loaded], None, now=10.0).rank == 0


def test_a_rank_that_is_asked_for_is_taken_whatever_its_load() -> None:
    all_engines = engines(3)
    all_engines[2].in_flight = 100
    assert Balancer().pick(all_engines, 2, now=1.0).rank == 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_rank_that_is_not_there_is_named_with_those_that_are(count: int) -> None:
    connected = ", ".join(map(str, range(count)))
    with pytest.raises(DataParallelRankError, match=f"^there is no engine of data-parallel rank 7; connected: {connected}$"):
        Balancer().pick(engines(count), 7, now=1.0)
