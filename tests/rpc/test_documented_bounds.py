"""Protects docs/rpc.md: its table has every knob, with the default that the code has."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from trio_frontend import rpc

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "rpc.md"


def shown(default: object) -> str:
    return f"{default.per_second:g}/s, {default.burst}" if isinstance(default, rpc.Rate) else str(default)


def test_every_knob_is_documented_with_its_default() -> None:
    documented = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE))
    limits = rpc.ServerLimits()
    defaults = {f.name: shown(getattr(limits, f.name)) for f in dataclasses.fields(limits) if f.name != "http2"}
    defaults |= {f"http2.{f.name}": shown(getattr(limits.http2, f.name)) for f in dataclasses.fields(limits.http2)}
    assert documented == defaults
