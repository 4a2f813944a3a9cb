"""Tokens and text: tokenizer, incremental detokenizer, stop strings, a model's files. Pure; only ``model_files`` reads files."""

from __future__ import annotations

from trio_frontend.text.detokenizer import Detokenizer, detokenizer
from trio_frontend.text.model_files import GenerationDefaults, ModelFiles, is_multimodal, read_config
from trio_frontend.text.stop_strings import StopStrings
from trio_frontend.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "GenerationDefaults",
    "ModelFiles",
    "StopStrings",
    "Tokenizer",
    "detokenizer",
    "is_multimodal",
    "read_config",
]
