"""Protects what is read of a model's files: which tokens end a text, the defaults, and clear words about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.families import family
from trio_frontend.text import GenerationDefaults, ModelFiles
from trio_frontend.text.model_files import ModelFilesError

END = "</s>"


def write_model(
    path: Path,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    path.mkdir(exist_ok=True)
    family("byte_level").backend.save(str(path / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("generation_config", generation_config),
        ("tokenizer_config", tokenizer_config),
    ):
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "token", "expected"),
    [
        (3, [5, 7], END, (1, (3, 5, 7))),
        (3, [5, 7], {"content": END}, (1, (3, 5, 7))),
        (3, [5, 7], None, (3, (5, 7))),
        ([3, 4], None, None, (3, (4,))),
        (3, 6, END, (1, (3, 6))),
        (None, None, END, (1, ())),
        (None, None, None, (None, ())),
        (None, [5, 1, 7], END, (1, (5, 7))),
        (None, [5, 7], "no such token", (5, (7,))),
    ],
)
def test_the_ids_that_end_a_text(
    tmp_path: Path, config_eos: Any, generation_eos: Any, token: Any, expected: tuple[int | None, tuple[int, ...]]
) -> None:
    assert family("byte_level").token_to_id(END) == 1
    config = {"vocab_size": 512} | ({} if config_eos is None else {"eos_token_id": config_eos})
    write_model(
        tmp_path,
        config,
        None if generation_eos is None else {"eos_token_id": generation_eos},
        None if token is None else {"eos_token": token},
    )
    model = ModelFiles.load(tmp_path)
    assert (model.eos_token_id, model.extra_eos_token_ids) == expected


def test_the_vocabulary_is_the_models_and_may_be_larger_than_the_tokenizers(tmp_path: Path) -> None:
    assert ModelFiles.load(write_model(tmp_path, {"vocab_size": 512, "max_position_embeddings": 2048})).vocab_size == 512
    assert ModelFiles.load(tmp_path).max_position == 2048
    assert ModelFiles.load(write_model(tmp_path / "bare")).vocab_size == family("byte_level").vocab_size


def test_a_multimodal_model_keeps_its_settings_one_level_down(tmp_path: Path) -> None:
    config = {"text_config": {"vocab_size": 600, "eos_token_id": 9, "max_position_embeddings": 77}}
    model = ModelFiles.load(write_model(tmp_path, config))
    assert (model.vocab_size, model.eos_token_id, model.max_position) == (600, 9, 77)


def test_generation_defaults_are_read_and_temperature_is_none_of_them(tmp_path: Path) -> None:
    values = {"temperature": 0.7, "top_k": 11, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "max_new_tokens": 7}
    model = ModelFiles.load(write_model(tmp_path, generation_config=values | {"presence_penalty": 0.5, "do_sample": True}))
    assert model.generation_defaults == GenerationDefaults(
        max_new_tokens=7, top_k=11, top_p=0.9, min_p=0.05, presence_penalty=0.5, repetition_penalty=1.3
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": "x"}, "'x'"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_a_default_out_of_its_range_is_refused_by_name(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        ModelFiles.load(write_model(tmp_path, generation_config=values))


def test_tokenizer_and_config_may_be_elsewhere(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = write_model(tmp_path / "tokenizer", tokenizer_config={"eos_token": END})
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"vocab_size": 1000}')
    loaded = ModelFiles.load(model, tokenizer=tokenizer, hf_config_path=config)
    assert (loaded.vocab_size, loaded.eos_token_id, loaded.name) == (1000, 1, str(model))
    assert ModelFiles.load(model, tokenizer=tokenizer / "tokenizer.json", hf_config_path=config).eos_token_id == 1


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no such directory"):
        ModelFiles.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        ModelFiles.load(tmp_path / "empty")
    write_model(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text("{nope")
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        ModelFiles.load(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text('{"vocab_size": -1}')
    with pytest.raises(ModelFilesError, match="vocab_size must be a positive integer, got -1"):
        ModelFiles.load(tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFilesError, match="is not a tokenizer"):
        ModelFiles.load(tmp_path / "bad")


def test_a_repository_that_is_not_cached_is_an_error_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFilesError, match="neither cached nor reachable"):
        ModelFiles.load("someone/something")
