"""Protects what a tokenizer tells of itself, and that lengths a tokenizer.json may carry do not cut prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.families import FAMILIES, family
from trio_frontend.text import Tokenizer


@given(text=st.text(max_size=60))
def test_a_text_has_no_fewer_tokens_than_the_longest_token_allows(text: str) -> None:
    tokenizer = family("byte_level")
    assert tokenizer.longest_token is not None
    assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "byte_level"])
def test_tokenizers_with_normalizers_or_unknown_tokens_have_no_longest_token(name: str) -> None:
    assert family(name).longest_token is None


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = family("byte_level").backend.__class__.from_str(family("byte_level").backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog."
    assert Tokenizer.from_directory(tmp_path).encode(text) == family("byte_level").encode(text)
    assert len(family("byte_level").encode(text)) > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_in_a_text_are_recognized(name: str) -> None:
    tokenizer = family(name)
    assert tokenizer.token_to_id("<|im_end|>") in tokenizer.encode("a<|im_end|>b")
