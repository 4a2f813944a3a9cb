"""A model of a few files, an engine that the test drives, and a server in memory over both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import tokenizers
import trio

from trio_frontend.client import Channel
from trio_frontend.config import ServerConfig
from trio_frontend.testing import Frontend, ScriptedEngine, open_frontend


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's directory: a token for each byte, and no weights."""
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": 0}))
    return str(directory)


@pytest.fixture
def config(model: str) -> Callable[..., ServerConfig]:
    """``config(**settings)``: a config for the model, on a port of the system's choice."""

    def make(**settings: Any) -> ServerConfig:
        return ServerConfig(model=model, **{"port": 0, **settings})

    return make


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def frontend(engine: ScriptedEngine, config: Callable[..., ServerConfig]) -> AsyncIterator[Frontend]:
    async with open_frontend(engine, config()) as frontend:
        yield frontend
        # What every test of a request's end ends with: nothing is left of it anywhere.
        await trio.testing.wait_all_tasks_blocked()
        assert engine.live == ()


@pytest.fixture
async def channel(frontend: Frontend) -> AsyncIterator[Channel]:
    async with frontend.connect() as channel:
        yield channel
