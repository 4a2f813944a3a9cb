"""Protects what opens the engine: each argument reaches the engine that it is for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trio_frontend.cli import build_parser
from trio_frontend.cli.engines import opener
from trio_frontend.cli.errors import UsageError
from trio_frontend.cli.serve import choose_engine
from trio_frontend.engine import embedded, vllm
from trio_frontend.testing import ScriptedEngine

MODEL = str(embedded.SHIPPED_MODEL)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What was opened, with which arguments; nothing really is."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def stand_in(name: str) -> Any:
        @asynccontextmanager
        async def open_engine(*args: Any, **kwargs: Any) -> AsyncIterator[ScriptedEngine]:
            calls.append((name, args, kwargs))
            yield ScriptedEngine()

        return open_engine

    monkeypatch.setattr(embedded, "open_engine", stand_in("embedded"))
    monkeypatch.setattr(vllm, "open_engine", stand_in("external"))
    monkeypatch.setattr(vllm, "launch_engine", stand_in("owned"))
    return calls


async def open_for(*words: str, passed_through: tuple[str, ...] = ()) -> None:
    args = build_parser().parse_args(["serve", *words])
    args.passed_through = list(passed_through)
    async with opener(args, choose_engine(args.model, args.engine, args.handshake_address))():
        pass


async def test_without_a_model_the_packages_own_is_opened(opened) -> None:
    await open_for("--max-logprobs", "5")
    assert opened == [("embedded", (None,), {"max_logprobs": 5})]


async def test_a_directory_with_an_export_is_opened_here(opened) -> None:
    await open_for(MODEL)
    assert opened == [("embedded", (Path(MODEL),), {"max_logprobs": 20})]


async def test_an_engine_elsewhere_gets_its_options(opened) -> None:
    await open_for(
        *[MODEL, "--handshake-address", "tcp://0.0.0.0:5570", "--data-parallel-size", "4", "--advertise-host", "10.0.0.1"],
        *["--stall-timeout", "30", "--no-engine-reconnect", "--max-logprobs", "7", "--engine-start-timeout", "60"],
        *["--engine-heartbeat-timeout", "5"],
    )
    ((name, _, arguments),) = opened
    assert (name, arguments["handshake_address"], arguments["start_timeout"]) == ("external", "tcp://0.0.0.0:5570", 60)
    assert arguments["options"] == vllm.VllmOptions(
        data_parallel_size=4,
        advertise_host="10.0.0.1",
        heartbeat_timeout=5,
        stall_timeout=30,
        engine_reconnect=False,
        max_logprobs=7,
    )


async def test_an_owned_engine_reads_the_same_files_and_gets_the_flags_after_the_dashes(opened) -> None:
    await open_for(
        *[MODEL, "--engine", "vllm", "--vllm", "/opt/vllm", "--tokenizer", "t", "--hf-config-path", MODEL],
        passed_through=("--dtype", "float32"),
    )
    ((name, args, arguments),) = opened
    assert (name, args, arguments["vllm"]) == ("owned", (MODEL,), "/opt/vllm")
    assert arguments["arguments"] == ["--tokenizer", "t", "--hf-config-path", MODEL, "--dtype", "float32"]
    assert arguments["options"] == vllm.VllmOptions()


async def test_a_stall_timeout_of_0_is_none(opened) -> None:
    await open_for(MODEL, "--engine", "vllm", "--stall-timeout", "0")
    assert opened[0][2]["options"].stall_timeout is None


async def test_a_heartbeat_timeout_of_0_is_none(opened) -> None:
    await open_for(MODEL, "--engine", "vllm", "--engine-heartbeat-timeout", "0")
    assert opened[0][2]["options"].heartbeat_timeout is None


@pytest.mark.parametrize(
    ("config", "multimodal"),
    [
        ({"model_type": "llama", "hidden_size": 8}, False),
        ({"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 5}, True),
        ({"model_type": "llava", "image_token_index": 5}, True),
        ({"model_type": "qwen2_audio", "audio_config": {}}, True),
    ],
)
async def test_whether_a_model_takes_media_is_read_from_its_config(opened, tmp_path: Path, config, multimodal) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    await open_for(str(tmp_path), "--engine", "vllm")
    assert opened[0][2]["options"].supports_multimodal is multimodal


async def test_an_option_that_the_engine_cannot_have_is_a_usage_error(opened) -> None:
    with pytest.raises(UsageError, match="data_parallel_size is 65537"):
        await open_for(MODEL, "--engine", "vllm", "--data-parallel-size", "65537")
