"""Structured output through llguidance: a constraint compiled to a matcher, which says which tokens may come next.

llguidance and the tokenizer's token table are loaded by the first request that needs them. Everything here blocks
(milliseconds, for a huge grammar up to a second): it runs in worker threads.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trio_frontend.engine.base import StructuredOutput

if TYPE_CHECKING:
    import llguidance

__all__ = ["Grammar", "GrammarCompiler", "GrammarError"]


class GrammarError(Exception):
    """The matcher gave up (a limit of the grammar's complexity) or was given a token that it does not allow."""


class Grammar:
    """One request's matcher. ``finished`` once EOS has been accepted: nothing may follow."""

    __slots__ = ("_eos_token_ids", "_matcher", "_vocab_size", "finished")

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self.finished = False

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        """Rule out, in place, what may not come next; after a complete match only EOS may. Raises GrammarError."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        self._check()
        np.copyto(logits[: self._vocab_size], -np.inf, where=allowed[: self._vocab_size] == 0)

    def accept(self, token_id: int) -> None:
        """Go on by the token that was picked. Raises GrammarError."""
        if token_id in self._eos_token_ids:
            self.finished = True
        elif not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarError(f"token {token_id} does not match the grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar's matcher failed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles constraints for one model's tokenizer. May be used from several threads."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, constraint: StructuredOutput) -> Grammar:
        """A fresh matcher. Raises ValueError if the constraint (or this model) does not allow one."""
        import llguidance

        tokenizer = self._load_tokenizer()
        matcher = llguidance.LLMatcher(tokenizer, grammar_source(constraint), log_level=0)
        error = matcher.get_error()
        if error:
            raise ValueError(f"structured output: {constraint.kind} cannot be compiled: {error}")
        return Grammar(matcher, frozenset(self._eos_token_ids), self._vocab_size)

    def _load_tokenizer(self) -> llguidance.LLTokenizer:
        import llguidance

        with self._lock:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    raise ValueError("structured output: the model has no EOS token to end it with")
                self._tokenizer = llguidance.LLTokenizer(
                    str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                )
            return self._tokenizer


def grammar_source(constraint: StructuredOutput) -> str:
    """llguidance's own form of a constraint. Raises ValueError for what cannot be one."""
    import llguidance

    kind, value = constraint.kind, constraint.value
    if kind == "json_object":
        return _json_schema({"type": "object"})
    if kind == "choice":
        if not isinstance(value, tuple) or not value:
            raise ValueError("structured output: choice needs at least one string")
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(_literal(choice) for choice in value))
    if not isinstance(value, str):
        raise ValueError(f"structured output: {kind} must be a string")
    if kind == "json":
        return _json_schema(_parse_json(kind, value))
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(value)
    if kind == "grammar":
        return llguidance.grammar_from("grammar", value)
    return _structural_tag(_parse_json(kind, value))


def _parse_json(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"structured output: {kind} must be JSON: {error}") from None


def _json_schema(schema: Any) -> str:
    import llguidance

    # Free whitespace lets a small model go on with blanks until its tokens are used up; one space is also valid JSON.
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _structural_tag(tag: Any) -> str:
    """The form with ``structures`` (begin, schema, end) and ``triggers``; the newer one with ``format`` is not supported."""
    import llguidance

    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise ValueError("structured output: this engine supports structural_tag only with structures and triggers")
    tags = []
    for structure in tag["structures"]:
        begin = structure["begin"]
        trigger = next((trigger for trigger in tag["triggers"] if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"structured output: no trigger of structural_tag begins {begin!r}")
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=json.dumps(structure["schema"]), end=structure["end"])
        )
    if not tags:
        raise ValueError("structured output: structural_tag has no structures")
    return llguidance.StructTag.to_grammar(tags)
