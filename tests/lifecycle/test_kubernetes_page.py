"""Protects docs/kubernetes.md: its manifests are YAML, their flags are ours, and their times add up."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from trio_frontend.cli import build_parser
from trio_frontend.server import LAST_ANSWERS_TIMEOUT
from trio_frontend.services.health import LIVENESS

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
BLOCKS = [list(yaml.safe_load_all(block)) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
DEPLOYMENT, SERVICE = BLOCKS[0]
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
ENGINE_STOP = 15.0 + 5.0
"""Seconds for an owned engine to end: launch_engine's stop_timeout, and what the kernel has after SIGKILL."""


@pytest.mark.parametrize("arguments", [CONTAINER["args"], BLOCKS[1][0]["args"]])
def test_the_arguments_are_a_command_line_of_ours(arguments: list[str]) -> None:
    args = build_parser().parse_args(arguments)
    assert args.command == "serve"
    assert args.host == "0.0.0.0"


def test_the_probe_that_is_a_command_is_one_of_ours() -> None:
    (block,) = BLOCKS[2]
    _program, *words = block["readinessProbe"]["exec"]["command"]
    assert build_parser().parse_args(words).command == "health"


def test_the_grace_period_covers_every_step_of_the_shutdown() -> None:
    args = build_parser().parse_args(CONTAINER["args"])
    steps = args.withdrawal_grace + args.shutdown_timeout + LAST_ANSWERS_TIMEOUT + ENGINE_STOP
    assert DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= steps


def test_readiness_asks_the_server_and_liveness_the_process() -> None:
    assert CONTAINER["readinessProbe"]["grpc"] == {"port": 50051}
    assert CONTAINER["startupProbe"]["grpc"] == {"port": 50051}
    assert CONTAINER["livenessProbe"]["grpc"] == {"port": 50051, "service": LIVENESS}
    assert "preStop" not in str(DEPLOYMENT)


def test_the_ports_agree() -> None:
    args = build_parser().parse_args(CONTAINER["args"])
    assert CONTAINER["ports"][0]["containerPort"] == args.port == SERVICE["spec"]["ports"][0]["port"]


def test_every_flag_that_the_page_names_exists() -> None:
    serve = build_parser()._subparsers._group_actions[0].choices["serve"].format_help()  # type: ignore[union-attr]
    for flag in re.findall(r"`(--[a-z-]+)", PAGE):
        assert flag in serve, flag
    assert shlex.join(CONTAINER["command"]) == "trio-frontend"
