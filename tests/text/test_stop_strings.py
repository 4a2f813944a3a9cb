"""Protects that stop strings end the text where a brute-force search says, however the text is split, and hold back no more."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_frontend.text import StopStrings
from trio_frontend.text.stop_strings import REMEMBERED_CHARACTERS

letters = st.text(alphabet="ab", min_size=0, max_size=5)
strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5)


def reference(text: str, stops: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """The earliest end wins, then the first named; ends within the first ``after`` characters do not count."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def fed(stop_strings: StopStrings, parts: list[str]) -> tuple[str, str | None]:
    text = ""
    for part in parts:
        given_out, match = stop_strings.feed(part)
        text += given_out
        if match is not None:
            return text, match
    return text + stop_strings.release(), None


@given(parts=st.lists(letters, max_size=12), stops=strings, include=st.booleans())
def test_text_and_match_are_what_brute_force_finds(parts: list[str], stops: list[str], include: bool) -> None:
    assert fed(StopStrings(stops, include=include), parts) == reference("".join(parts), stops, include)


@given(passed=st.lists(letters, max_size=5), parts=st.lists(letters, max_size=8), stops=strings, include=st.booleans())
def test_matches_complete_in_text_that_is_passed_over_do_not_count(
    passed: list[str], parts: list[str], stops: list[str], include: bool
) -> None:
    stop_strings = StopStrings(stops, include=include)
    before = "".join(stop_strings.pass_over(part) for part in passed)
    text, match = fed(stop_strings, parts)
    assert (before + text, match) == reference("".join(passed + parts), stops, include, after=len("".join(passed)))


@given(parts=st.lists(letters, max_size=12), stops=strings)
def test_held_back_is_the_longest_end_that_begins_a_stop_string(parts: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    text = ""
    for part in parts:
        text += part
        if stop_strings.feed(part)[1] is not None:
            return
        ends = [text[start:] for start in range(len(text) + 1)]
        assert stop_strings.held == next(end for end in ends if any(s.startswith(end) and s != end for s in stops))


@given(part=letters, tentative=letters, stops=strings, include=st.booleans())
def test_peek_is_feed_without_a_trace(part: str, tentative: str, stops: list[str], include: bool) -> None:
    stop_strings, twin = StopStrings(stops, include=include), StopStrings(stops, include=include)
    if stop_strings.feed(part)[1] is not None:
        return
    twin.feed(part)
    peeked = stop_strings.peek(tentative)
    assert stop_strings.held == twin.held
    expected = twin.feed(tentative)
    assert peeked == (expected if expected[1] is not None else None)
    assert stop_strings.feed(tentative) == expected


@pytest.mark.parametrize(
    ("stops", "include", "parts", "expected"),
    [
        (["***"], False, [" a", "*", "*", "*b"], (" a", "***")),
        (["***"], True, [" a", "*", "*", "*b"], (" a***", "***")),
        (["abc", "b"], False, ["xabcz"], ("xa", "b")),
        (["abc", "bc"], False, ["xa", "bc"], ("x", "abc")),
        (["bc", "abc"], False, ["xa", "bc"], ("xa", "bc")),
        (["\n\n"], False, ["a\n", "b\n", "\n"], ("a\nb", "\n\n")),
        (["]", "^-\\"], False, ["a^-", "\\"], ("a", "^-\\")),
        (["世界"], False, ["世", "世", "界"], ("世", "世界")),
    ],
)
def test_cases(stops: list[str], include: bool, parts: list[str], expected: tuple[str, str | None]) -> None:
    assert fed(StopStrings(stops, include=include), parts) == expected


def test_text_that_can_begin_nothing_passes_at_once() -> None:
    stop_strings = StopStrings(["STOP", "\n\n"])
    assert stop_strings.feed("hello ") == ("hello ", None)
    assert stop_strings.feed("S") == ("", None)
    assert stop_strings.feed("TO") == ("", None)
    assert stop_strings.feed("nne") == ("STOnne", None)


def test_many_long_strings_that_nearly_match_cost_no_more_than_their_length() -> None:
    # Quadratic work would take minutes here.
    stop_strings = StopStrings(["a" * 20_000 + "b", *("a" * length + "c" for length in range(100, 200))])
    assert sum(len(stop_strings.feed("a" * 100)[0]) for _ in range(1000)) == 100_000 - 20_000


def test_large_automatons_are_shared_while_in_use_and_gone_afterwards() -> None:
    strings = ("x" * (REMEMBERED_CHARACTERS + 1), "y")
    first, second = StopStrings(strings), StopStrings(strings)
    assert first._automaton is second._automaton
    automaton = weakref.ref(first._automaton)
    del first, second
    assert automaton() is None
