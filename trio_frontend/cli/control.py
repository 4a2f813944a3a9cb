"""The operator's commands: ``info``, ``abort``, ``lora``, ``pause``, ``resume``, ``sleep``, ``wake``, ``weights``."""

from __future__ import annotations

import argparse

__all__ = ["add_commands"]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parsers of this module's commands."""
