"""Protects the model in the package: that it computes what a reference does, writes English, is small, and is one set of weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.record_reference import reference
from tools.sample_model import PROMPTS, Decoder, continuations, known_share, words

MODEL = Path(__file__).resolve().parents[2] / "trio_frontend/engine/embedded/model"
DATA = Path(__file__).parent / "data"
LIMIT_BYTES = 8_000_000


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(MODEL)


@pytest.fixture(scope="module")
def answers(decoder: Decoder, recorded: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    prompts = [case["prompt_token_ids"] for case in recorded["cases"]]
    return decoder.generate(prompts, recorded["new_tokens"], lambda _, logprobs: int(logprobs.argmax()))


def test_the_recorded_reference_was_made_with_the_shipped_weights(recorded: dict[str, Any]) -> None:
    weights = (MODEL / "model.safetensors").read_bytes()
    assert recorded["model_sha256"] == hashlib.sha256(weights).hexdigest(), "run tools/record_reference.py"
    assert len(recorded["cases"]) == 50


def test_the_tokenizer_gives_the_recorded_prompts(recorded: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for case in recorded["cases"]:
        assert tokenizer.encode(case["prompt"]).ids == case["prompt_token_ids"]
        assert tokenizer.decode(case["prompt_token_ids"]) == case["prompt"]


def test_greedy_tokens_and_logprobs_are_the_recorded_ones(
    answers: tuple[list[list[int]], list[list[float]]], recorded: dict[str, Any]
) -> None:
    for case, ids, logprobs in zip(recorded["cases"], *answers, strict=True):
        assert ids == case["token_ids"], case["prompt"]
        np.testing.assert_allclose(logprobs, case["logprobs"], atol=1e-3, err_msg=case["prompt"])


def test_greedy_tokens_and_logprobs_are_those_of_a_reference_run_now(
    answers: tuple[list[list[int]], list[list[float]]], recorded: dict[str, Any]
) -> None:
    pytest.importorskip("torch", reason="the reference needs PyTorch; the recorded values were compared instead")
    pytest.importorskip("transformers", reason="the reference needs transformers; the recorded values were compared instead")
    prompts = [case["prompt_token_ids"] for case in recorded["cases"]]
    for answer, ids, logprobs in zip(reference(MODEL, prompts, recorded["new_tokens"]), *answers, strict=True):
        assert ids == answer["token_ids"]
        np.testing.assert_allclose(logprobs, answer["logprobs"], atol=1e-3)


def test_a_prompt_padded_among_longer_ones_has_the_logprobs_it_has_alone(
    decoder: Decoder, answers: tuple[list[list[int]], list[list[float]]], recorded: dict[str, Any]
) -> None:
    prompts = [case["prompt_token_ids"] for case in recorded["cases"]]
    shortest, longest = min(range(50), key=lambda i: len(prompts[i])), max(range(50), key=lambda i: len(prompts[i]))
    assert len(prompts[shortest]) < len(prompts[longest])
    for index in (shortest, longest):
        ids, logprobs = decoder.generate([prompts[index]], recorded["new_tokens"], lambda _, values: int(values.argmax()))
        assert ids[0] == answers[0][index]
        np.testing.assert_allclose(logprobs[0], answers[1][index], atol=1e-4)


def test_sampled_text_is_made_of_words_of_the_training_text() -> None:
    samples = continuations(MODEL, temperature=0.7, most_tokens=250, seed=1)
    vocabulary = set((DATA / "words.txt").read_text().split())
    assert len(samples) == len(PROMPTS) == 20
    assert all(len(words(text)) >= 20 for _, text, _ in samples)
    assert known_share([text for _, text, _ in samples], vocabulary) >= 0.9
    assert sum(ended for _, _, ended in samples) >= 5, "stories come to an end by themselves"


def test_text_of_random_letters_is_not_counted_as_known_words() -> None:
    vocabulary = set((DATA / "words.txt").read_text().split())
    letters = np.random.default_rng(0).choice(list("etaoinshrdlu "), 4000)
    assert known_share(["".join(letters)], vocabulary) < 0.5


def test_the_graph_holds_no_weights_but_points_at_every_tensor_of_the_safetensors_file() -> None:
    graph = (MODEL / "model.onnx").read_bytes()
    with (MODEL / "model.safetensors").open("rb") as stream:
        (header_length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert len(graph) < 100_000
    for name, entry in tensors.items():
        assert name.encode() in graph
        assert entry["dtype"] == "F32"
        assert str(8 + header_length + entry["data_offsets"][0]).encode() in graph
    parameters = sum(int(np.prod(entry["shape"])) for entry in tensors.values())
    assert 1_000_000 <= parameters <= 3_000_000


def test_the_directory_is_what_hugging_face_and_onnx_readers_expect_and_fits_in_the_wheel() -> None:
    sizes = {file.name: file.stat().st_size for file in MODEL.iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.onnx",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(sizes) == wanted
    assert sum(sizes.values()) <= LIMIT_BYTES
    config = json.loads((MODEL / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert 2000 <= tokenizer.get_vocab_size() == config["vocab_size"] <= 4000
    assert [tokenizer.id_to_token(config[f"{name}_token_id"]) for name in ("bos", "eos", "pad")] == ["<s>", "</s>", "<pad>"]


def test_the_same_seed_gives_the_same_stories_and_all_their_words_are_recorded() -> None:
    from tools.stories import stories
    from tools.stories import words as story_words

    some = list(stories(1, 300))
    assert some == list(stories(1, 300))
    assert some[:20] != list(stories(2, 20))
    vocabulary = set((DATA / "words.txt").read_text().split())
    assert {word for story in some for word in story_words(story)} <= vocabulary
    assert all(words(story) == story_words(story) for story in some)
    assert not any(mark in story for story in some for mark in "{}[]|^")
