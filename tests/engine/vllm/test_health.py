"""Health is what the first failure made it until a new life serves; stalls begin and end on time; scanners are no engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing
import zmq

from trio_frontend.engine.base import EngineHealth, EngineState
from trio_frontend.engine.vllm.health import Activity, HealthBoard, PeerWatch, watch_stall
from trio_frontend.engine.vllm.transport import MonitorEvent


def accepted(fd: int) -> MonitorEvent:
    return MonitorEvent(zmq.EVENT_ACCEPTED, fd)


def disconnected(fd: int) -> MonitorEvent:
    return MonitorEvent(zmq.EVENT_DISCONNECTED, fd)


GREETED = MonitorEvent(zmq.EVENT_HANDSHAKE_SUCCEEDED, -1)


# Whose connection went.


def test_the_loss_of_the_only_connection_is_the_engines() -> None:
    watch = PeerWatch()
    assert not watch.gone(accepted(5))
    assert not watch.connected
    assert not watch.gone(GREETED)
    assert watch.connected
    assert watch.gone(disconnected(5))


def test_a_scanner_that_comes_and_goes_is_not_taken_for_the_engine() -> None:
    watch = PeerWatch()
    assert not any(watch.gone(event) for event in (accepted(5), disconnected(5), accepted(5), GREETED))
    assert not any(watch.gone(event) for event in (accepted(6), disconnected(6)))
    assert watch.gone(disconnected(5))


def test_once_the_engines_connection_is_known_no_other_counts() -> None:
    watch = PeerWatch()
    for event in (accepted(5), GREETED, accepted(6), GREETED):
        assert not watch.gone(event)
    watch.engine_fd = 6
    assert not watch.gone(disconnected(5))
    assert watch.gone(disconnected(6))


def test_a_connection_that_was_never_accepted_is_ignored() -> None:
    assert not PeerWatch().gone(disconnected(9))


# The board.


def board(ranks: int = 2) -> HealthBoard:
    found = HealthBoard(range(ranks))
    for rank in range(ranks):
        found.serving(rank)
    return found


def test_health_is_starting_until_every_rank_serves() -> None:
    found = HealthBoard(range(2))
    assert found.value.value == EngineHealth(EngineState.STARTING, "waiting for rank 0, 1")
    found.serving(1)
    assert found.value.value == EngineHealth(EngineState.STARTING, "waiting for rank 0")
    found.serving(0)
    assert found.value.value == EngineHealth(EngineState.SERVING)


def test_the_first_failure_stays_whatever_follows() -> None:
    found = board()
    found.failed(1, EngineState.UNHEALTHY, "garbage")
    found.failed(0, EngineState.LOST, "gone")
    found.failed(1, EngineState.LOST, "gone as well")
    found.stalled(0, "no output")
    assert found.value.value == EngineHealth(EngineState.UNHEALTHY, "rank 1: garbage")


def test_a_failure_ends_when_a_new_life_of_that_rank_serves() -> None:
    found = board()
    found.failed(1, EngineState.LOST, "gone")
    found.failed(0, EngineState.LOST, "gone")
    found.serving(1)
    assert found.value.value == EngineHealth(EngineState.LOST, "rank 0: gone")
    found.serving(0)
    assert found.value.value.serving


def test_a_stall_ends_when_outputs_flow() -> None:
    found = board()
    found.stalled(1, "no output for 5 s")
    assert found.value.value == EngineHealth(EngineState.STALLED, "rank 1: no output for 5 s")
    found.flowing(1)
    assert found.value.value.serving


def test_a_stall_of_an_engine_that_has_failed_changes_nothing() -> None:
    found = board(1)
    found.failed(0, EngineState.LOST, "gone")
    found.stalled(0, "no output")
    found.flowing(0)
    assert found.value.value.state is EngineState.LOST


def test_each_change_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    found = board(1)
    caplog.clear()
    found.failed(0, EngineState.LOST, "the connection went")
    found.failed(0, EngineState.LOST, "again")
    assert [record.getMessage() for record in caplog.records] == [
        "engine health: serving -> engine_lost: rank 0: the connection went"
    ]


# The stall watch, on Trio's clock.


class Watched:
    """A stall watch of 10 seconds, and what it said when."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.said: list[tuple[float, str]] = []

    async def run(self) -> None:
        await watch_stall(self.activity, 10.0, self._say, lambda: self._say("flowing"))

    def _say(self, what: str) -> None:
        self.said.append((trio.current_time(), what))

    def busy(self) -> None:
        self.activity.busy(trio.current_time())

    def output(self) -> None:
        self.activity.output(trio.current_time())


STALLED = "requests are running and no output came for 10 s"


async def played(*moves: tuple[float, Callable[[Watched], None]]) -> list[tuple[float, str]]:
    """What the watch says, as seconds from the start, when ``moves`` happen at their times."""
    watched = Watched()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.run)
        for at, move in moves:
            await trio.sleep_until(start + at)
            move(watched)
        await trio.sleep_until(start + 100)
        nursery.cancel_scope.cancel()
    return [(round(at - start, 6), what) for at, what in watched.said]


async def test_an_idle_engine_never_stalls(autojump_clock: trio.testing.MockClock) -> None:
    assert await played() == []


async def test_requests_without_an_output_are_a_stall_after_the_timeout(autojump_clock: trio.testing.MockClock) -> None:
    assert await played((3, Watched.busy)) == [(13, STALLED)]


async def test_each_output_puts_the_stall_off(autojump_clock: trio.testing.MockClock) -> None:
    assert await played((3, Watched.busy), (12, Watched.output), (21, Watched.output)) == [(31, STALLED)]


async def test_the_next_output_ends_a_stall_and_the_watch_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    said = await played((0, Watched.busy), (30, Watched.output))
    assert said == [(10, STALLED), (30, "flowing"), (40, STALLED)]


async def test_a_stall_ends_when_its_last_request_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    assert await played((0, Watched.busy), (30, lambda w: w.activity.idle())) == [(10, STALLED), (30, "flowing")]


async def test_a_new_first_request_starts_the_time_anew(autojump_clock: trio.testing.MockClock) -> None:
    moves = ((0, Watched.busy), (9, lambda w: w.activity.idle()), (15, Watched.busy), (24, Watched.output))
    assert await played(*moves) == [(34, STALLED)]
