"""What one token adds to the text, for the decoders whose work can be done token by token.

``tokenizers`` decodes a list of tokens with a decoder named in tokenizer.json. Three families cover nearly every language model:

* byte-level (GPT-2 and after): every character of a token stands for a byte, the bytes together are UTF-8;
* byte fallback (Llama 2, Gemma): ``▁`` is a space, tokens ``<0xE4>`` are bytes, and a run of those is text only as a whole;
* metaspace (T5 and kin): ``▁`` is a space, the one at the very beginning is dropped.

The rules below are those of the library's ``decoders`` (byte_level.rs, byte_fallback.rs, strip.rs, metaspace.rs), applied to one
token. ``decoding_rule`` recognizes a family only if the decoder is exactly one of these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenizers

__all__ = ["ByteFallbackRule", "ByteLevelRule", "DecodingRule", "MetaspaceRule", "Piece", "PieceTable", "decoding_rule"]

Piece: TypeAlias = "str | bytes | None"
"""Text; bytes that are no complete text by themselves; or None: the token is left out, as if it were not there."""


@dataclass(frozen=True, slots=True)
class ByteLevelRule:
    """A token is bytes, one for each character, or its own UTF-8 if any character stands for no byte."""

    def piece(self, token: str) -> Piece:
        try:
            data = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


@dataclass(frozen=True, slots=True)
class ByteFallbackRule:
    """``replacement`` becomes a space, ``<0xNN>`` a byte; at the very beginning of the text one space is dropped if ``strip``."""

    replacement: str
    strip: bool

    def piece(self, token: str) -> Piece:
        token = token.replace(self.replacement, " ") if self.replacement else token
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token


@dataclass(frozen=True, slots=True)
class MetaspaceRule:
    """``replacement`` becomes a space, except in the very first token if ``drop_first``: there it is dropped."""

    replacement: str
    drop_first: bool

    def piece(self, token: str) -> Piece:
        return token.replace(self.replacement, " ")


DecodingRule: TypeAlias = "ByteLevelRule | ByteFallbackRule | MetaspaceRule"


def decoding_rule(backend: tokenizers.Tokenizer) -> DecodingRule | None:
    """The family of ``backend``'s decoder, or None if its work cannot be done token by token."""
    decoder = json.loads(backend.to_str()).get("decoder") if backend.decoder is not None else None
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return ByteLevelRule()
        case {"type": "Metaspace", "replacement": str(replacement), "prepend_scheme": scheme}:
            return MetaspaceRule(replacement, drop_first=scheme != "never")
        case {"type": "Sequence", "decoders": list(decoders)}:
            return _byte_fallback(decoders)
        case _:
            return None


def _byte_fallback(decoders: list[dict[str, Any]]) -> ByteFallbackRule | None:
    match decoders:
        case [
            {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]:
            return ByteFallbackRule(pattern, strip=False)
        case [
            {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0},
        ]:
            return ByteFallbackRule(pattern, strip=start == 1)
        case _:
            return None


class PieceTable(dict[int, Piece]):
    """Token id to piece, looked up once per token and kept. Ids that the tokenizer does not know are None and are not kept."""

    def __init__(self, backend: tokenizers.Tokenizer, rule: DecodingRule, skipped: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._rule = rule
        self._skipped = skipped

    def __missing__(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        piece = None if token in self._skipped else self._rule.piece(token)
        self[token_id] = piece
        return piece


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own byte, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
