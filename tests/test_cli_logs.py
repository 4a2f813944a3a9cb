"""Protects that a log line is one line, whatever a caller or an engine put into it."""

from __future__ import annotations

import json
import logging
from typing import Literal

import pytest

from trio_frontend.cli.logs import configure_logging, have_the_hub_log_through_us


@pytest.fixture
def root_logger():
    """The root logger, as it was afterwards."""
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    yield root
    root.handlers[:], logging.raiseExceptions = handlers, raising
    root.setLevel(level)


def logged(form: Literal["text", "json"], capsys: pytest.CaptureFixture[str], **extra: object) -> list[str]:
    configure_logging("info", form)
    logging.getLogger("x").warning("it happened", extra=extra)
    return capsys.readouterr().err.splitlines()


FORGED = "r\n2026-01-01 00:00:00 INFO x: all is well\x1b[2J\u2028"


def test_a_value_with_line_breaks_or_control_characters_is_quoted(root_logger, capsys) -> None:
    (line,) = logged("text", capsys, request_id=FORGED, n=3, plain="a b")
    assert line.endswith(f" WARNING x: it happened request_id={FORGED!r} n=3 plain=a b")


def test_so_it_is_in_json(root_logger, capsys) -> None:
    (line,) = logged("json", capsys, request_id="r\nall is well\x1b[2J")
    assert json.loads(line)["request_id"] == "r\nall is well\x1b[2J"


def test_what_the_hubs_client_says_comes_once_and_in_our_form(root_logger, capsys) -> None:
    hub = logging.getLogger("huggingface_hub")
    own = logging.StreamHandler()
    hub.addHandler(own)
    try:
        configure_logging("info", "json")
        have_the_hub_log_through_us()
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying")
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        hub.removeHandler(own)
    assert json.loads(line)["message"] == "Retrying"
