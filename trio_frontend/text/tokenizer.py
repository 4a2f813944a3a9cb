"""A model's tokenizer: text in, token ids out, and back.

A thin layer over the ``tokenizers`` library. Truncation and padding that a tokenizer.json may carry are switched off: lengths
are the request's business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from trio_frontend.text.pieces import ByteLevelRule, DecodingRule, PieceTable, decoding_rule

__all__ = ["Tokenizer"]


class Tokenizer:
    """Made from a ``tokenizers.Tokenizer``, or read from a tokenizer.json.

    ``rule`` says how tokens become text, and is None for a decoder whose work cannot be done token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.rule: DecodingRule | None = decoding_rule(backend)
        self._special_contents = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        self._tables: dict[bool, PieceTable] = {}

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json. Raises OSError if it cannot be read, ValueError if it is no tokenizer."""
        content = Path(path).read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises a bare Exception for whatever is wrong in the file
            raise ValueError(f"{os.fspath(path)} is not a tokenizer: {error}") from error
        return cls(backend)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read ``path``/tokenizer.json, as ``from_file`` does."""
        return cls.from_file(Path(path) / "tokenizer.json")

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included. A model's own vocabulary may be larger (padding)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer adds; special tokens in the text are recognized.

        Lets other threads run meanwhile (the library's batch call releases the interpreter, its single one does not).
        """
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All ids at once: what every incremental decoding must add up to. Unknown ids add nothing."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of text that one token can stand for at most, None if there is no telling: a normalizer may shrink a text, and
        an unknown token can stand for any. Byte-level tokenizers have neither, as a rule.

        So a text of n characters has at least n / longest_token tokens. Walks the vocabulary once: some 10 ms.
        """
        added = self.backend.get_added_tokens_decoder().values()
        if not isinstance(self.rule, ByteLevelRule) or self.backend.normalizer is not None:
            return None
        if any(token.lstrip or token.rstrip for token in added):
            return None
        # A token has a character for each byte, and a character of text is one byte or more.
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=None)

    def adds_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether ``decode`` looks at this id: it is known, and no special token that is skipped."""
        token = self.backend.id_to_token(token_id)
        return token is not None and not (skip_special_tokens and token in self._special_contents)

    def pieces(self, *, skip_special_tokens: bool) -> PieceTable:
        """What each token adds to the text; shared by all requests, filled as tokens are seen. Needs a ``rule``."""
        table = self._tables.get(skip_special_tokens)
        if table is None:
            if self.rule is None:
                raise ValueError("this tokenizer's decoder does not work token by token")
            skipped = self._special_contents if skip_special_tokens else frozenset[str]()
            table = self._tables[skip_special_tokens] = PieceTable(self.backend, self.rule, skipped)
        return table
