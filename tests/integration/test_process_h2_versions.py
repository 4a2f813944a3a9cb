"""Protects what docs/embedding.md says of h2: what goes with purerpc's pin, and what goes for those who override it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def overridden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds h2 4 and Hypercorn 0.18 before ours."""
    target = tmp_path_factory.mktemp("overridden")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    packages = ["h2>=4.3,<5", "hpack>=4.1,<5", "hyperframe>=6.1,<7", "hypercorn==0.18.0"]
    installed = subprocess.run([*command, *packages], check=False, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install them here: {installed.stderr.strip().splitlines()[-1]}")
    return {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_with_pip_alone_it_is_h2_3_and_hypercorn_0_17() -> None:
    assert version("h2").startswith("3.")
    assert version("hypercorn").startswith("0.17.")


def test_with_h2_4_purerpc_does_not_import_on_its_own(overridden: dict[str, str]) -> None:
    tried = run(overridden, "-c", "import purerpc.client")
    assert tried.returncode == 1
    assert "PingAcknowledged" in tried.stderr


def test_with_h2_4_purerpc_imports_after_trio_frontend(overridden: dict[str, str]) -> None:
    tried = run(overridden, "-c", "import trio_frontend, purerpc.client, h2; print(h2.__version__)")
    assert (tried.returncode, tried.stderr) == (0, "")
    assert tried.stdout.startswith("4.")


@pytest.mark.parametrize(
    "tests", ["tests/lifecycle/test_beside_a_web_app.py", "tests/client", "tests/lifecycle/test_request_ends.py"]
)
def test_with_h2_4_and_hypercorn_0_18_the_tests_pass(overridden: dict[str, str], tests: str) -> None:
    tried = run(overridden, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert tried.returncode == 0, tried.stdout
