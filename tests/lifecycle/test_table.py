"""Protects docs/lifecycle.md: each of its rows is a test that exists, and each test of an end is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "lifecycle.md").read_text()
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and "::" in line]
IN_FULL = ["request_ends", "watch_ends", "engine_ends", "every_await"]
"""Files all of whose tests are rows. Others have tests of other things too."""


def names_in(path: str) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, functions) and node.name.startswith("test_")
    ]


def named_tests() -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", TABLE)


def test_it_has_at_least_forty_rows_each_with_one_test_of_its_own() -> None:
    assert len(ROWS) >= 40
    assert all(row.count("::") == 1 and row.count(" | ") == 3 for row in ROWS)
    assert len(named_tests()) == len(ROWS) == len(set(named_tests()))


@pytest.mark.parametrize("path", sorted({name.split("::")[0] for name in named_tests()}))
def test_every_test_that_it_names_exists(path: str) -> None:
    named = {name.split("::")[1] for name in named_tests() if name.startswith(f"{path}::")}
    assert named <= set(names_in(path))


@pytest.mark.parametrize("name", IN_FULL)
def test_every_test_of_an_end_is_in_it(name: str) -> None:
    path = f"tests/lifecycle/test_{name}.py"
    assert {f"{path}::{test}" for test in names_in(path)} <= set(named_tests())


def test_every_test_of_the_process_is_in_it() -> None:
    path = "tests/integration/test_process_ends.py"
    assert {f"{path}::{test}" for test in names_in(path)} <= set(named_tests())
