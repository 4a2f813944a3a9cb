"""Cancels a scenario at its 1st, 2nd, 3rd, ... await, until it runs to its end, and looks each time at what is left behind.

A step is what Trio runs of a task from one checkpoint to the next. The cancel comes right after step n, when the task has just
begun to wait: so over all n every await of the scenario has been the one that raised Cancelled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio
import trio.testing

__all__ = ["Trigger", "cancel_at_every_step", "every_task"]

MAX_STEPS = 5_000
"""A scenario that takes more does not end."""


def every_task(_: trio.lowlevel.Task) -> bool:
    return True


class Trigger(trio.abc.Instrument):
    """Counts steps from :meth:`arm` on, the one that arms included, and cancels after step ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0
        self.fired = False
        self.armed = False

    def arm(self, cancel: Callable[[], object], counted: Callable[[trio.lowlevel.Task], bool]) -> None:
        """Count the steps of the tasks that ``counted`` picks; call ``cancel()`` after the one that it is about."""
        self._cancel = cancel
        self._counted = counted
        self.armed = True
        trio.lowlevel.add_instrument(self)

    def disarm(self) -> None:
        """What follows (the scenario's own tidying up) is not counted."""
        if self.armed:
            self.armed = False
            trio.lowlevel.remove_instrument(self)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._counted(task):
            self.steps += 1
            if self.steps == self.at:
                self.fired = True
                self._cancel()


@dataclass(frozen=True)
class Resources:
    """What is there: taken before and after a scenario, and compared."""

    tasks: int = field(default_factory=lambda: trio.lowlevel.current_statistics().tasks_living)
    descriptors: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir("/proc/self/fd")))


Scenario = Callable[[Trigger], Awaitable[None]]
"""Sets up, arms the trigger, runs what is cancelled, disarms, and checks its own engine and channels: it raises what it finds."""


def cancel_at_every_step(scenario: Scenario) -> int:
    """Run ``scenario`` in a fresh Trio run for each n; returns how many steps it takes uncancelled."""
    for n in range(1, MAX_STEPS):
        trigger = Trigger(n)
        trio.run(_once, scenario, trigger, clock=trio.testing.MockClock(autojump_threshold=0))
        if not trigger.fired:
            return trigger.steps
    raise AssertionError(f"the scenario takes more than {MAX_STEPS} steps")


async def _once(scenario: Scenario, trigger: Trigger) -> None:
    # Trio keeps what it opens once: the first thread, its wakeup sockets.
    await trio.to_thread.run_sync(int)
    before = Resources()
    await scenario(trigger)
    trigger.disarm()
    after = Resources()
    for _ in range(100):
        if after.descriptors == before.descriptors:
            break
        # A thread that was left to itself may have a file open; it is about to end.
        await trio.to_thread.run_sync(time.sleep, 0.01)
        after = Resources()
    where = f"cancelled at await {trigger.at}"
    assert after.tasks == before.tasks, f"{where}: {after.tasks - before.tasks} task(s) are left"
    assert after.descriptors == before.descriptors, (
        f"{where}: descriptors are left: {after.descriptors ^ before.descriptors}"
    )
