"""Stop strings: found across token borders, with no more text held back than could begin one.

Rules that hold here:

* The match that is complete first ends the text; of two that are complete at the same character, the one named first
  (``check_stop_strings`` in ``vllm/v1/engine/detokenizer.py``).
* Held back is the longest end of the text that begins a stop string, and nothing else. If stop strings are to be included in
  the text, nothing is.
* The cost is one step of an automaton (Aho and Corasick, 1975) for each character, however many strings there are, and none for
  text without a character that begins one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final
from weakref import WeakValueDictionary

__all__ = ["REMEMBERED_CHARACTERS", "StopStrings"]

REMEMBERED_CHARACTERS: Final = 1024
"""Characters of all strings of an automaton that outlives its use: 128 of them are some 40 MB. It is built in a few milliseconds."""


class _Automaton:
    """Nodes are the prefixes of all strings, node 0 the empty one.

    ``matches[node]`` is the index of the first string that ends in that node, or -1. ``holds[node]`` is the length of the longest
    end of the text that could still become a string.
    """

    __slots__ = ("__weakref__", "_fails", "_nexts", "begins", "holds", "matches", "strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.begins = re.compile("[" + re.escape("".join(sorted({string[0] for string in strings}))) + "]").search
        self._nexts: list[dict[str, int]] = [{}]
        self.matches = [-1]
        depths = [0]
        for index, string in enumerate(strings):
            node = 0
            for character in string:
                following = self._nexts[node].get(character)
                if following is None:
                    following = self._nexts[node][character] = len(self._nexts)
                    self._nexts.append({})
                    self.matches.append(-1)
                    depths.append(depths[node] + 1)
                node = following
            if self.matches[node] == -1:
                self.matches[node] = index
        self._fails = [0] * len(self._nexts)
        self.holds = [0] * len(self._nexts)
        self._link(depths)

    def _link(self, depths: list[int]) -> None:
        """Breadth first, so that a node's fail node, which is shallower, is done before it."""
        level = [0]
        while level:
            below = []
            for node in level:
                fail = self._fails[node]
                self.holds[node] = depths[node] if self._nexts[node] else self.holds[fail]
                if self.matches[fail] != -1 and (self.matches[node] == -1 or self.matches[fail] < self.matches[node]):
                    self.matches[node] = self.matches[fail]
                for character, child in self._nexts[node].items():
                    if node:
                        self._fails[child] = self.step(fail, character)
                    below.append(child)
            level = below

    def step(self, node: int, character: str) -> int:
        while True:
            following = self._nexts[node].get(character)
            if following is not None:
                return following
            if not node:
                return 0
            node = self._fails[node]


_shared: WeakValueDictionary[tuple[str, ...], _Automaton] = WeakValueDictionary()
"""Every automaton that is in use."""


@lru_cache(maxsize=128)
def _remembered(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)


def _automaton(strings: tuple[str, ...]) -> _Automaton:
    """The one of ``strings``. Small ones are remembered, so that requests which name the same need not build it again; large ones are
    shared while there is a use of them, and then their memory is free."""
    if sum(map(len, strings)) <= REMEMBERED_CHARACTERS:
        return _remembered(strings)
    automaton = _shared.get(strings)
    if automaton is None:
        automaton = _shared[strings] = _Automaton(strings)
    return automaton


class StopStrings:
    """One sequence's. ``strings`` are not empty, and there is at least one. ``include`` leaves the match in the text."""

    __slots__ = ("_automaton", "_held", "_include", "_node")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._automaton = _automaton(tuple(strings))
        self._include = include
        self._node = 0
        self._held = ""

    @property
    def held(self) -> str:
        """The text that is held back now."""
        return self._held

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be given, and the stop string that ended it, if one did: then nothing may be fed any more."""
        if not self._node and self._automaton.begins(text) is None:
            return text, None
        node, matches = self._node, self._automaton.matches
        for position, character in enumerate(text):
            node = self._automaton.step(node, character)
            if matches[node] != -1:
                return self._cut(text[: position + 1], self._automaton.strings[matches[node]])
        return self._advance(node, text), None

    def pass_over(self, text: str) -> str:
        """As ``feed``, but strings that are complete within ``text`` do not count. One that begins in it can still be."""
        node = self._node
        for character in text:
            node = self._automaton.step(node, character)
        return self._advance(node, text)

    def peek(self, text: str) -> tuple[str, str] | None:
        """What ``feed(text)`` would give if it held a match, else None; changes nothing."""
        node, matches = self._node, self._automaton.matches
        for position, character in enumerate(text):
            node = self._automaton.step(node, character)
            if matches[node] != -1:
                return self._cut(text[: position + 1], self._automaton.strings[matches[node]])
        return None

    def release(self) -> str:
        """The end of the text has come: what was held back is text after all."""
        held, self._held = self._held, ""
        self._node = 0
        return held

    def _cut(self, text: str, string: str) -> tuple[str, str]:
        return (text if self._include else (self._held + text).removesuffix(string)), string

    def _advance(self, node: int, text: str) -> str:
        self._node = node
        if self._include:
            return text
        text = self._held + text
        keep = len(text) - self._automaton.holds[node]
        self._held = text[keep:]
        return text[:keep]
