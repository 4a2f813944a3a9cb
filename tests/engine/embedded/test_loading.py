"""Protects the loading of a model's directory: what is found where, and one clear error for all that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trio_frontend.engine.embedded import SHIPPED_MODEL, UnreadableModelError, load_model, open_engine


def directory(path: Path, **files: Any) -> Path:
    """A model's directory with config.json and a model.onnx that is none, unless ``files`` (name without suffix) say otherwise."""
    contents = {"config": {"max_position_embeddings": 32}, **files}
    (path / "model.onnx").write_bytes(b"no graph")
    for name, content in contents.items():
        if content is not None:
            (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


BROKEN: list[tuple[str, Callable[[Path], Path], str, str]] = [
    ("no directory", lambda path: path / "nowhere", "nowhere", "no such directory"),
    ("no graph", lambda path: path, "model.onnx", "no such file"),
    ("no config", lambda path: directory(path, config=None), "config.json", "no such file"),
    ("config is no JSON", lambda path: directory(path, config="{"), "config.json", "line 1"),
    ("config is no object", lambda path: directory(path, config=[1]), "config.json", "JSON object"),
    ("no context length", lambda path: directory(path, config={"vocab_size": 3}), "config.json", "how long the context is"),
    (
        "generation config is no JSON",
        lambda path: directory(path, generation_config="x"),
        "generation_config.json",
        "line 1",
    ),
    (
        "odd EOS",
        lambda path: directory(path, generation_config={"eos_token_id": "</s>"}),
        "generation_config.json",
        "'</s>'",
    ),
    ("graph is none", directory, "model.onnx", "protobuf"),
]


@pytest.mark.parametrize(("make", "file", "reason"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_what_is_wrong_with_a_model_is_one_error_with_file_and_reason(
    tmp_path: Path, make: Callable[[Path], Path], file: str, reason: str
) -> None:
    with pytest.raises(UnreadableModelError) as caught:
        load_model(make(tmp_path))
    assert caught.value.path.name == file
    assert reason.lower() in caught.value.reason.lower()
    assert str(caught.value.path) in str(caught.value)
    assert caught.value.reason in str(caught.value)


async def test_opening_an_engine_over_an_unreadable_model_raises_that_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModelError, match="no such directory"):
        async with open_engine(tmp_path / "nowhere"):
            pass


def linked(path: Path, graph_folder: Path, config: dict[str, Any], generation_config: dict[str, Any] | None) -> Path:
    """The shipped model's graph and weights with another configuration."""
    graph_folder.mkdir(exist_ok=True)
    for file in SHIPPED_MODEL.iterdir():
        if "config" not in file.name:
            (graph_folder / file.name).symlink_to(file)
    (path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path


@pytest.mark.parametrize(
    ("config", "generation_config", "eos", "context"),
    [
        ({"n_positions": 77, "eos_token_id": 1}, None, (1,), 77),
        ({"max_position_embeddings": 64}, {"eos_token_id": [5, 1]}, (5, 1), 64),
        ({"max_position_embeddings": 64, "eos_token_id": 1}, {"eos_token_id": [5, 1]}, (1, 5), 64),
        ({"max_position_embeddings": 64}, {}, (), 64),
        ({"text_config": {"max_position_embeddings": 50, "eos_token_id": 4}}, None, (4,), 50),
    ],
)
def test_context_and_eos_are_read_from_the_configuration(
    tmp_path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, eos: tuple[int, ...], context: int
) -> None:
    model = load_model(linked(tmp_path, tmp_path, config, generation_config))
    assert (model.eos_token_ids, model.max_model_len) == (eos, context)
    assert model.session.vocab_size == load_model(SHIPPED_MODEL).session.vocab_size


def test_a_graph_in_a_folder_named_onnx_is_found(tmp_path: Path) -> None:
    model = load_model(linked(tmp_path, tmp_path / "onnx", {"max_position_embeddings": 64}, None), max_batch_rows=1)
    assert model.max_batch_rows == 1
    assert model.tokenizer_file == tmp_path / "tokenizer.json"
