"""Incremental detokenization: token ids in, one at a time, text out as soon as it is certain.

Rules that hold here:

* The text of all steps and the flush, joined, is what decoding all ids at once gives, wherever the steps are split. The prompt
  is context: ``decode(prompt + output) == decode(prompt) + joined text`` (a character begun in the prompt and completed in
  the output counts as output).
* No step gives half a character, or text that a later token changes.
* Bytes that never become a character come out as U+FFFD.

One exception, with its reason, stands at ``MAX_BYTE_RUN``.
"""

from __future__ import annotations

import abc
import codecs
from collections.abc import Sequence
from functools import partial

from trio_frontend.text.pieces import ByteFallbackRule, ByteLevelRule, MetaspaceRule, PieceTable
from trio_frontend.text.tokenizer import Tokenizer

__all__ = ["MAX_BYTE_RUN", "Detokenizer", "detokenizer"]

MAX_BYTE_RUN = 64
"""Bytes. With byte fallback a run of byte tokens is text only as a whole: one bad byte, and the library makes U+FFFD of every
byte of the run. So a run is held back until it ends, but no longer than this: characters that are complete by then are given."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 8
"""Tokens of context that the slow way keeps, and twice as many before it cuts back to them."""


class Detokenizer(abc.ABC):
    """One sequence's. Make one with :func:`detokenizer`."""

    __slots__ = ()

    @abc.abstractmethod
    def step(self, token_id: int) -> str:
        """The text that is certain now and was not before. Unknown and skipped ids add nothing."""

    @abc.abstractmethod
    def flush(self) -> str:
        """What is left at the end, U+FFFD for what could not be completed."""

    @property
    def clean(self) -> bool:
        """Nothing is held back, nor special about where the text stands: a token adds here what it adds in most places."""
        return False

    @property
    def tentative(self) -> str:
        """Text that ``flush`` would give now and that is all proper characters, so that a stop string in it ends the request
        at the right token; empty otherwise."""
        return ""


def detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    """A detokenizer for what follows ``prompt_token_ids``, by the fastest way that is exact for this tokenizer."""
    rule = tokenizer.rule
    if rule is None:
        return _WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
    match rule:
        case ByteLevelRule():
            return ByteLevelDetokenizer(pieces, prompt_token_ids)
        case ByteFallbackRule():
            return _ByteFallbackDetokenizer(rule, pieces, prompt_token_ids)
        case MetaspaceRule():
            return _MetaspaceDetokenizer(rule, tokenizer, prompt_token_ids, skip_special_tokens)


class ByteLevelDetokenizer(Detokenizer):
    """Bytes to UTF-8. ``pending`` is the beginning of a character, at most three bytes (or of a surrogate, which Python's
    decoder sees through one byte late).

    While nothing is pending and a token's piece is text, that piece is the step: callers on the hot path may look for themselves.
    """

    __slots__ = ("pending", "pieces")

    def __init__(self, pieces: PieceTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self.pieces = pieces
        self.pending = b""
        self._prime(prompt_token_ids)

    def _prime(self, prompt_token_ids: Sequence[int]) -> None:
        """A character has four bytes at most: only the prompt's last three can be the beginning of one."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = self.pieces[token_id]
            if type(piece) is bytes:
                tail = piece + tail
            elif piece:
                break
            if len(tail) >= 3:
                break
        if tail:
            self._decode(tail[-3:])

    def _decode(self, data: bytes) -> str:
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return text

    @property
    def clean(self) -> bool:
        return not self.pending

    def step(self, token_id: int) -> str:
        piece = self.pieces[token_id]
        if type(piece) is str:
            if self.pending and piece:
                # Text begins with no continuation byte: what is pending stays incomplete.
                return self.flush() + piece
            return piece
        if piece is None:
            return ""
        return self._decode(self.pending + piece)  # type: ignore[operator]  # bytes: str and None are gone

    def flush(self) -> str:
        if not self.pending:
            return ""
        text = self.pending.decode(errors="replace")
        self.pending = b""
        return text


class _ByteFallbackDetokenizer(Detokenizer):
    """``_run`` is the run of byte tokens that is not text yet; ``_bad`` means that this run holds a bad byte, so that each
    byte of it, also those to come, is U+FFFD."""

    __slots__ = ("_bad", "_pieces", "_run", "_strip")

    def __init__(self, rule: ByteFallbackRule, pieces: PieceTable, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._bad = False
        self._strip = rule.strip
        start = len(prompt_token_ids)
        while start and not isinstance(pieces[prompt_token_ids[start - 1]], str):
            start -= 1
        # Everything before the run that the prompt ends with is text already (an empty string of text does not occur).
        self._strip = rule.strip and not start
        for token_id in prompt_token_ids[start:]:
            self.step(token_id)
        self._drop_complete_characters()

    def _drop_complete_characters(self) -> None:
        """Those are the prompt's."""
        text, used = codecs.utf_8_decode(self._run, "strict", False)
        if text:
            self._strip = False
            del self._run[:used]

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is str:
            if self._run or self._bad:
                return self._stripped(self._end_run() + piece)
            return self._stripped(piece) if self._strip else piece
        if piece is None:
            return ""
        if self._bad:
            return _REPLACEMENT
        run = self._run
        run += piece  # type: ignore[arg-type]  # bytes: str and None are gone
        try:
            text, used = codecs.utf_8_decode(run, "strict", False)
        except UnicodeDecodeError:
            self._bad = True
            text, used = _REPLACEMENT * len(run), len(run)
        else:
            if len(run) < MAX_BYTE_RUN:
                return ""
        del run[:used]
        return self._stripped(text)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    @property
    def clean(self) -> bool:
        return not (self._run or self._bad or self._strip)

    @property
    def tentative(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text.removeprefix(" ") if self._strip else text

    def _end_run(self) -> str:
        self._bad = False
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _MetaspaceDetokenizer(Detokenizer):
    """Only the very first token differs from its piece."""

    __slots__ = ("_first", "_pieces", "_rule", "_token")

    def __init__(
        self, rule: MetaspaceRule, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._rule = rule
        self._token = tokenizer.backend.id_to_token
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._first = rule.drop_first and all(self._pieces[token_id] is None for token_id in prompt_token_ids)

    @property
    def clean(self) -> bool:
        return not self._first

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if self._first:
            self._first = False
            return str(self._token(token_id)).replace(self._rule.replacement, "")
        return piece  # type: ignore[return-value]  # this rule makes text only

    def flush(self) -> str:
        return ""


class _WindowDetokenizer(Detokenizer):
    """For every other decoder: decode a window of the last tokens before and after each step, and give the difference.

    Text that ends with U+FFFD is held back, since the next token may complete it. Costs microseconds per token and window.
    """

    __slots__ = ("_counts", "_decode", "_ids", "_known", "_skip")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._skip = skip_special_tokens
        self._counts = partial(tokenizer.adds_text, skip_special_tokens=skip_special_tokens)
        self._ids = [token_id for token_id in prompt_token_ids[-4 * _WINDOW :] if self._counts(token_id)][-_WINDOW:]
        self._known = self._text().rstrip(_REPLACEMENT)

    def _text(self) -> str:
        return str(self._decode(self._ids, skip_special_tokens=self._skip))

    def step(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._ids) < MAX_BYTE_RUN:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._text())

    def _give(self, text: str) -> str:
        new = text[len(self._known) :]
        if len(self._ids) > 2 * _WINDOW:
            del self._ids[:-_WINDOW]
            text = self._text()
        self._known = text
        return new
