"""Protects the private nursery: one failure comes out as it is, with its own cause and context; several stay a group."""

# ruff: noqa: PT012 - the nursery is the block, and raises at its end

from __future__ import annotations

import traceback

import pytest
import trio

from trio_frontend.nurseries import open_private_nursery


async def _fail(error: Exception) -> None:
    try:
        raise LookupError("what it was doing")
    except LookupError:
        raise error  # noqa: B904 - its context is the point


async def test_a_failure_of_the_block_comes_out_as_it_is() -> None:
    error = ValueError("block")
    with pytest.raises(ValueError, match="block") as caught:
        async with open_private_nursery():
            raise error
    assert caught.value is error


async def test_a_failure_of_a_task_comes_out_as_it_is_and_is_shown_once_with_its_own_context() -> None:
    with pytest.raises(ValueError, match="task") as caught:
        async with open_private_nursery() as nursery:
            nursery.start_soon(_fail, ValueError("task"))
            await trio.sleep_forever()
    shown = "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value.__context__, LookupError)
    assert shown.count("ValueError: task") == 1
    assert "ExceptionGroup" not in shown


async def test_two_failures_stay_a_group() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_private_nursery() as nursery:
            nursery.start_soon(_fail, ValueError("one"))
            nursery.start_soon(_fail, KeyError("two"))
    assert {type(error) for error in caught.value.exceptions} == {ValueError, KeyError}


async def test_a_group_that_the_block_raises_stays_what_it_is() -> None:
    group = ExceptionGroup("mine", [ValueError("x")])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_private_nursery():
            raise group
    # Trio may have made it anew while it looked for Cancelled inside; it is still that one group, not a group in a group.
    assert (caught.value.message, caught.value.exceptions) == (group.message, group.exceptions)


async def test_a_cancel_goes_through() -> None:
    with trio.move_on_after(0) as scope:
        async with open_private_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught
