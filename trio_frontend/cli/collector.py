"""Python's garbage collector in a process that does nothing but serve. Never called where the server is a guest.

What a request allocates is freed by its reference counts; the collector is for what is left, and finds next to nothing. With Python's
defaults it looks for it after every 700 allocations, and costs a tenth of a short request.
"""

from __future__ import annotations

import gc

__all__ = ["tune_collector"]

YOUNG = 10_000
"""Allocations, less frees, before young objects are looked at: about a hundred requests, a third of a millisecond."""
MIDDLE = 20
OLD = 50
"""Young collections before a middle one, and middle before a full one: a full one looks at all live requests."""


def tune_collector() -> None:
    """Leave alone what has been loaded, and look at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
