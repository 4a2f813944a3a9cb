"""Cancels a scenario at its 1st, 2nd, 3rd, ... step, until it runs to its end, and looks each time at what is left behind.

A step is what Trio runs of a task between two checkpoints. Cancelling before step n means that the task's next await raises
Cancelled, so over all n every await of the scenario has been the one that raised.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

__all__ = ["Leftovers", "StepCounter", "cancel_at_every_step"]

MAX_STEPS = 5_000
"""A scenario that takes more does not end."""


class StepCounter(trio.abc.Instrument):
    """Counts the steps of the tasks that ``counted`` picks, and calls ``then`` before step ``at``."""

    def __init__(self, at: int, then: Callable[[], None], counted: Callable[[trio.lowlevel.Task], bool]) -> None:
        self.at = at
        self.then = then
        self.counted = counted
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.counted(task):
            self.steps += 1
            if self.steps == self.at:
                self.then()


@dataclass(frozen=True)
class Leftovers:
    """What is there beside the scenario itself: taken before and after it, and compared."""

    tasks: int = field(default_factory=lambda: trio.lowlevel.current_statistics().tasks_living)
    descriptors: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir("/proc/self/fd")))


Scenario = Callable[[trio.CancelScope, Callable[[], None]], Awaitable[Any]]
"""``scenario(scope, begin)``: sets up, calls ``begin()`` where counting begins, and runs what is cancelled inside ``scope``. It
checks its own engine and channels before it returns, and raises what it finds."""


def cancel_at_every_step(scenario: Scenario, *, whole_run: bool = False) -> int:
    """Run ``scenario`` in a fresh Trio run for each n; returns how many steps it took uncancelled.

    The steps counted are those of the task that calls ``begin``, or with ``whole_run`` those of every task from then on.
    """
    for n in range(1, MAX_STEPS):
        finished, steps = trio.run(_once, scenario, n, whole_run, clock=trio.testing.MockClock(autojump_threshold=0))
        if finished:
            assert n > 1, "the scenario has no step to be cancelled at"
            return steps
    raise AssertionError(f"the scenario takes more than {MAX_STEPS} steps")


async def _once(scenario: Scenario, n: int, whole_run: bool) -> tuple[bool, int]:
    # Whatever Trio opens for itself, it has opened before we look.
    await trio.to_thread.run_sync(int)
    before = Leftovers()
    scope = trio.CancelScope()
    fired = False

    def cancel() -> None:
        nonlocal fired
        fired = True
        scope.cancel()

    counter: StepCounter | None = None

    def begin() -> None:
        nonlocal counter
        ours = trio.lowlevel.current_task()
        counter = StepCounter(n, cancel, (lambda task: True) if whole_run else (lambda task: task is ours))
        trio.lowlevel.add_instrument(counter)

    try:
        with trio.fail_after(3600):
            await scenario(scope, begin)
    finally:
        assert counter is not None, "the scenario never began"
        trio.lowlevel.remove_instrument(counter)
    gc.collect()
    after = Leftovers()
    assert after.tasks == before.tasks, f"step {n}: {after.tasks - before.tasks} task(s) left"
    assert after.descriptors == before.descriptors, f"step {n}: descriptors left: {after.descriptors ^ before.descriptors}"
    return not fired, counter.steps
