"""Protects that streamed text equals decoding all ids at once, for every tokenizer family, and that no step takes text back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.families import FAMILIES, SPECIAL, family
from trio_frontend.text import Tokenizer, detokenizer
from trio_frontend.text.detokenizer import MAX_BYTE_RUN

ids = st.lists(st.integers(0, 470), max_size=40)
"""Beyond the largest vocabulary, so that unknown ids come too."""


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    stream = detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.step(token_id) for token_id in output), stream.flush()]


@pytest.mark.parametrize("name", FAMILIES)
@given(output=ids, skip=st.booleans())
def test_steps_and_flush_joined_are_the_text_of_all_ids_at_once(name: str, output: list[int], skip: bool) -> None:
    tokenizer = family(name)
    assert "".join(streamed(tokenizer, [], output, skip)) == tokenizer.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(max_size=30), skip=st.booleans())
def test_the_text_of_encoded_text_comes_back_as_the_tokenizer_gives_it(name: str, text: str, skip: bool) -> None:
    tokenizer = family(name)
    output = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, [], output, skip)) == tokenizer.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("name", FAMILIES)
@given(text=st.text(alphabet="ab 世ß🙂\n.", max_size=30), cut=st.integers(0, 60), skip=st.booleans())
def test_prompt_and_output_join_wherever_the_border_is(name: str, text: str, cut: int, skip: bool) -> None:
    tokenizer = family(name)
    everything = tokenizer.encode(text)
    cut = min(cut, len(everything))
    prompt, output = everything[:cut], everything[cut:]
    continued = "".join(streamed(tokenizer, prompt, output, skip))
    # The prompt's text is that of its complete characters. A byte-fallback decoder gives up a whole run of bytes for one that is cut,
    # so there the cut one's bytes, which are tokens, are left out; elsewhere a token may end one character and begin the next.
    while (before := tokenizer.decode(prompt, skip_special_tokens=skip)).endswith("\ufffd") and "byte_fallback" in name:
        prompt = prompt[:-1]
    before = before.rstrip("\ufffd")
    assert before + continued == tokenizer.decode(everything, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "llama_byte_fallback", "gemma_byte_fallback"])
@given(text=st.text(alphabet="a世ß🙂 ", min_size=1, max_size=20))
def test_no_step_gives_half_a_character(name: str, text: str) -> None:
    tokenizer = family(name)
    for piece in streamed(tokenizer, [], tokenizer.encode(text), True):
        assert "\ufffd" not in piece


@given(output=ids)
def test_byte_level_text_lags_by_no_more_than_a_character_that_is_not_complete(output: list[int]) -> None:
    tokenizer = family("byte_level")
    stream = detokenizer(tokenizer)
    text = ""
    for count, token_id in enumerate(output, start=1):
        text += stream.step(token_id)
        now = tokenizer.decode(output[:count])
        assert now.startswith(text)
        assert now[len(text) :] in ("", "\ufffd", "\ufffd\ufffd")


def test_bytes_that_never_become_a_character_come_out_at_the_flush() -> None:
    tokenizer = family("byte_level")
    first, second, _ = (tokenizer.token_to_id(character) for character in "ä¸ĸ")
    stream = detokenizer(tokenizer)
    assert [stream.step(first), stream.step(second), stream.flush(), stream.flush()] == ["", "", "\ufffd", ""]


def test_a_character_begun_in_the_prompt_and_completed_in_the_output_is_output() -> None:
    tokenizer = family("byte_level")
    halves = [tokenizer.token_to_id(character) for character in "ä¸ĸ"]
    letter = tokenizer.token_to_id("a")
    stream = detokenizer(tokenizer, [letter, *halves[:2]])
    assert [stream.step(halves[2]), stream.step(letter)] == ["世", "a"]


def test_the_space_of_a_word_after_the_prompt_is_kept() -> None:
    tokenizer = family("llama_byte_fallback")
    word = tokenizer.encode("the")
    assert "".join(streamed(tokenizer, word, word, True)) == " the"
    begin = tokenizer.token_to_id(SPECIAL[0])
    assert "".join(streamed(tokenizer, [begin], word, True)) == "the"


def test_a_run_of_byte_tokens_is_tentative_until_it_ends() -> None:
    tokenizer = family("llama_byte_fallback")
    newline, letter = tokenizer.token_to_id("<0x0A>"), tokenizer.token_to_id("e")
    stream = detokenizer(tokenizer, [letter])
    assert (stream.step(newline), stream.tentative) == ("", "\n")
    assert (stream.step(newline), stream.tentative) == ("", "\n\n")
    assert (stream.step(letter), stream.tentative) == ("\n\ne", "")


def test_a_run_of_byte_tokens_is_held_back_no_longer_than_its_bound() -> None:
    tokenizer = family("llama_byte_fallback")
    emoji = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    stream = detokenizer(tokenizer, [tokenizer.token_to_id("e")])
    waiting = 0
    for count in range(1, 4 * MAX_BYTE_RUN):
        text = stream.step(emoji[(count - 1) % 4])
        waiting = 0 if text else waiting + 1
        assert waiting < MAX_BYTE_RUN
        assert text == "" or set(text) == {"🙂"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=3_000, deadline=None)
@given(prompt=ids, output=st.lists(st.integers(0, 470), max_size=60), skip=st.booleans())
def test_long_run_any_ids_join(name: str, prompt: list[int], output: list[int], skip: bool) -> None:
    tokenizer = family(name)
    assert "".join(streamed(tokenizer, [], prompt + output, skip)) == tokenizer.decode(
        prompt + output, skip_special_tokens=skip
    )
