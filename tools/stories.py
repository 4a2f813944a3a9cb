"""Make simple stories out of a grammar: the text that the shipped model is trained on.

    python tools/stories.py [--seed N] [--count N]

Every word of them comes from story_grammar.txt beside this file, which was written for this project and is under its licence
(Apache-2.0); no other text is used. The same seed gives the same stories.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

GRAMMAR = Path(__file__).with_name("story_grammar.txt")
OPTIONAL_CHANCE = 0.6
ANIMALS_CHANCE = 0.45
CONTRACTED_CHANCE = 0.5
LIMIT = 30
"""Rules within rules: more than this many is a grammar that never ends."""

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}

CONTRACTIONS = [
    (r"\b([Dd]o|[Dd]id|[Dd]oes|[Ii]s|[Ww]as|[Ss]hould|[Cc]ould|[Ww]ould|[Hh]as|[Hh]ave) not\b", r"\1n't"),
    (r"\b([Cc]an)not\b", r"\1't"),
    (r"\bI am (?=[a-z])", "I'm "),
    (r"\bLet us\b", "Let's"),
    (r"\bI will (?=[a-z])", "I'll "),
    (r"\bI have (?=[a-z]+(?:ed|en|ught|st)\b)", "I've "),
    (r"\b([Ii]t|[Tt]hat|[Ww]hat) is (?=[a-z])", r"\1's "),
    (r"\b([Yy]ou) are (?=[a-z])", r"\1're "),
]
"""How people speak, inside quotation marks: pattern and replacement, in this order."""


@dataclass(frozen=True)
class Grammar:
    rules: dict[str, list[str]]
    plots: dict[str, list[str]]

    @classmethod
    def load(cls, path: Path = GRAMMAR) -> Grammar:
        rules: dict[str, list[str]] = {}
        plots: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                continue
            if line.startswith("--- "):
                lines = rules.setdefault(line[4:], [])
            elif line.startswith("=== "):
                lines = plots.setdefault(line[4:], [])
            else:
                lines.append(line)
        return cls({name: [line for line in rule if line] for name, rule in rules.items()}, plots)


def cast(rules: dict[str, list[str]], rng: random.Random) -> dict[str, str]:
    """The values of one story: who takes part, and when. A story is among people or among animals."""
    values = {"season": rng.choice(rules["seasons"])}
    world = "animals" if rng.random() < ANIMALS_CHANCE else "people"
    names: set[str] = set()
    kinds: set[str] = set()
    for letter, prefix, the, a in (("H", "", "the_hero", "a_hero"), ("F", "f", "the_friend", "a_friend")):
        pronoun = rng.choice(sorted(PRONOUNS))
        name = rng.choice([name for name in rules[f"{world}_named_{pronoun}"] if name not in names])
        if world == "animals":
            kind = rng.choice([kind for kind in rules["animals"] if kind not in kinds])
        else:
            kind = rng.choice(rules[f"people_{pronoun}"])
        adjective = rng.choice(rules["adjectives"])
        names.add(name)
        kinds.add(kind)
        values |= pronouns(prefix, pronoun)
        values |= {letter: name, the: rng.choice([f"the {adjective} {kind}", f"the {kind}"]), a: f"a {adjective} {kind}"}
    elder, pronoun, who = rng.choice(rules[f"{world}_elders"]).split("; ")
    values |= pronouns("e", pronoun) | {"E": elder, "who_E": who}
    small = rng.choice([kind for kind in rules["small_animals"] if kind not in kinds])
    values |= {"a_small": f"a {rng.choice(['tiny', 'baby', 'little', 'small'])} {small}", "the_small": f"the little {small}"}
    villain = rng.choice([kind for kind in rules["villains"] if kind not in kinds])
    values |= {"V": villain, "villain": f"a {rng.choice(['big', 'huge', 'grumpy', 'fierce'])} {villain}"}
    return values | {"home_H": "{animal_home}" if world == "animals" else "{home}"}


def pronouns(prefix: str, pronoun: str) -> dict[str, str]:
    return dict(zip((f"{prefix}{form}" for form in ("he", "him", "his", "self")), PRONOUNS[pronoun], strict=True))


@dataclass
class Story:
    """One telling: expands templates, and uses no alternative of a rule twice before all were used."""

    grammar: Grammar
    rng: random.Random
    values: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)

    def tell(self, plot: str) -> str:
        self.values = cast(self.grammar.rules, self.rng)
        self.values["home_H"] = self.expand(self.values["home_H"])
        paragraphs: list[list[str]] = [[]]
        for line in self.grammar.plots[plot]:
            if line.startswith("let "):
                name, template = line[4:].split(" = ", 1)
                self.values[name] = self.expand(template)
            elif not line:
                paragraphs.append([])
            elif not line.startswith("? ") or self.rng.random() < OPTIONAL_CHANCE:
                paragraphs[-1].append(polish(self.expand(line.removeprefix("? "))))
        text = "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)
        return contract(text) if self.rng.random() < CONTRACTED_CHANCE else text

    def expand(self, template: str, depth: int = 0) -> str:
        if depth > LIMIT:
            raise ValueError(f"the grammar never ends at {template!r}")
        out: list[str] = []
        at = 0
        while at < len(template):
            character = template[at]
            if character in "{[":
                end = closing(template, at)
                inside = template[at + 1 : end]
                if character == "{":
                    out.append(self.look_up(self.expand(inside, depth + 1), depth))
                else:
                    out.append(self.expand(self.rng.choice(alternatives(inside)), depth + 1))
                at = end + 1
            else:
                out.append(character)
                at += 1
        return "".join(out)

    def look_up(self, name: str, depth: int) -> str:
        if name in self.values:
            return self.values[name]
        if name not in self.grammar.rules:
            raise ValueError(f"the grammar has no rule {name!r}")
        if not self.unused.get(name):
            self.unused[name] = self.rng.sample(self.grammar.rules[name], len(self.grammar.rules[name]))
        return self.expand(self.unused[name].pop(), depth + 1)


def closing(template: str, start: int) -> int:
    """The index of the bracket that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(template)):
        if template[at] in "{[":
            depth += 1
        elif template[at] in "}]":
            depth -= 1
            if depth == 0:
                return at
    raise ValueError(f"a bracket stays open in {template!r}")


def alternatives(inside: str) -> list[str]:
    """Split at each | that is in no inner bracket."""
    parts, depth = [""], 0
    for character in inside:
        depth += (character in "{[") - (character in "}]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def polish(sentence: str) -> str:
    """Capitals at the beginning and after a full stop, "an" before a vowel, and one mark where two would meet."""
    sentence = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])(?!one\b|uni|use)", r"\1n ", sentence)
    sentence = re.sub(r"([.!?])\.", r"\1", sentence)
    sentence = re.sub(r'([.!?]),"', r'\1"', sentence)
    sentence = re.sub(r'^("?)([a-z])', lambda match: match[1] + match[2].upper(), sentence)
    sentence = re.sub(r'(\. "?|[!?] "|\." |: ")([a-z])', lambda match: match[1] + match[2].upper(), sentence)
    return re.sub(r"\^(\w)", lambda match: match[1].upper(), sentence)


def contract(text: str) -> str:
    """The same text with "don't" for "do not" and the like in what is spoken."""

    def spoken(match: re.Match[str]) -> str:
        speech = match[0]
        for pattern, replacement in CONTRACTIONS:
            speech = re.sub(pattern, replacement, speech)
        return speech

    return re.sub(r'"[^"]*"', spoken, text)


def stories(seed: int, count: int) -> Iterator[str]:
    """``count`` stories, each without a trailing newline; story i depends on ``seed`` and i alone."""
    grammar = Grammar.load()
    names = sorted(grammar.plots)
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        yield Story(grammar, rng).tell(rng.choice(names))


def words(text: str) -> list[str]:
    """The words of a text in lower case: what the vocabulary of words is counted in."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=5)
    arguments = parser.parse_args()
    print("\n\n---\n\n".join(stories(arguments.seed, arguments.count)))


if __name__ == "__main__":
    main()
