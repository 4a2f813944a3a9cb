"""Small tokenizers of every family, made with the library's own trainers, for the tests of this room and of others."""

from __future__ import annotations

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from trio_frontend.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. And then?\n",
    "Stop strings match across token borders, held back until they cannot.\n",
    "Grüße aus Köln, çа va, привет мир, 世界 こんにちは 🙂🙃 e\u0301\n",
    "for i in range(10):\n    print(i, end='')\n",
] * 3

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_end|>"]
ADDED = ["<tool>", "ünï", "two words", "é"]


def _add_tokens(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    )
    _add_tokens(backend)
    return backend


def _byte_fallback(strip: bool) -> tokenizers.Tokenizer:
    """As sentencepiece's BPE models are converted: Llama 2 with ``strip``, Gemma without."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        limit_alphabet=45,
        special_tokens=["<unk>", *SPECIAL, *byte_tokens],
        show_progress=False,
    )
    trained.train_from_iterator([text.strip() for text in CORPUS], trainer)
    state = trained.to_str()
    # The trainer makes special tokens of the byte tokens; a converted model has them in the vocabulary only.

    content = json.loads(state)
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    content["model"]["byte_fallback"] = True
    content["model"]["fuse_unk"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    _add_tokens(backend)
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False),
    )
    _add_tokens(backend)
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    )
    _add_tokens(backend)
    return backend


MAKERS = {
    "byte_level": _byte_level,
    "llama_byte_fallback": lambda: _byte_fallback(strip=True),
    "gemma_byte_fallback": lambda: _byte_fallback(strip=False),
    "metaspace": _metaspace,
    "word_piece": _word_piece,
}
FAMILIES = sorted(MAKERS)


@cache
def family(name: str) -> Tokenizer:
    return Tokenizer(MAKERS[name]())
