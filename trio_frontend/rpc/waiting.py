"""One task that waits until another wakes it: the only primitive that rpc/ adds to Trio's own.

Rules that hold here:

* A Waiter holds one task at a time; a second raises trio.BusyResourceError.
* Waking is idempotent and never waits. The woken task runs in the next turn of the loop, and must look again at what it waited for.
* A cancelled wait leaves the Waiter empty.
"""

from __future__ import annotations

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

__all__ = ["Waiter"]


class Waiter:
    """Where one task parks. Cheaper than trio.Event, which serves once and any number of tasks."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: Task | None = None

    @property
    def waiting(self) -> bool:
        return self._task is not None

    async def wait(self) -> None:
        """Park this task until :meth:`wake`. Returns with the wake-up, or raises Cancelled."""
        if self._task is not None:
            raise trio.BusyResourceError("another task waits here already")
        self._task = current_task()
        await wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        """Let the waiting task go on, if there is one."""
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def _abort(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED
