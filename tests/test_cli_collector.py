"""The garbage collector is tuned for a process of its own, and left alone in someone else's."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from trio_frontend.cli.collector import MIDDLE, OLD, YOUNG, tune_collector
from trio_frontend.testing import ScriptedEngine, open_frontend


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_what_is_loaded_is_looked_at_no_more_and_the_rest_less_often() -> None:
    gc.unfreeze()
    tune_collector()
    assert gc.isenabled()
    assert gc.get_threshold() == (YOUNG, MIDDLE, OLD)
    assert gc.get_freeze_count() > 1000


async def test_a_server_in_an_app_leaves_its_collector_alone() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    async with open_frontend(ScriptedEngine()):
        assert (gc.get_threshold(), gc.get_freeze_count()) == before
