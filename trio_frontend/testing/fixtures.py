"""Fixtures for pytest-trio: ``pytest_plugins = ["trio_frontend.testing.fixtures"]``.

``scripted_engine`` is an engine that the test drives, ``frontend`` a server in memory over it, ``channel`` a connection to that.
A test that wants another config overrides ``frontend_config``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from trio_frontend.client import Channel
from trio_frontend.config import ServerConfig
from trio_frontend.testing import Frontend, ScriptedEngine, open_frontend

__all__ = ["channel", "frontend", "frontend_config", "scripted_engine"]


@pytest.fixture
def scripted_engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def frontend_config() -> ServerConfig:
    return ServerConfig()


@pytest.fixture
async def frontend(scripted_engine: ScriptedEngine, frontend_config: ServerConfig) -> AsyncIterator[Frontend]:
    async with open_frontend(scripted_engine, frontend_config) as frontend:
        yield frontend


@pytest.fixture
async def channel(frontend: Frontend) -> AsyncIterator[Channel]:
    async with frontend.connect() as channel:
        yield channel
