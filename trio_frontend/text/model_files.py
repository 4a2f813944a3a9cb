"""What a frontend reads of a model: its tokenizer, its vocabulary size, how its texts end, its sampling defaults.

Weights are the engine's. The files are those that ``transformers`` writes (tokenizer.json, tokenizer_config.json, config.json,
generation_config.json), in a directory or in a repository of the Hugging Face hub; ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_TOKEN``
do there what that library says.

How a model's texts end, by vLLM's rules: its EOS is the tokenizer's ``eos_token``, else the first ``eos_token_id`` of config.json,
else of generation_config.json; every other ``eos_token_id`` of both ends a text too.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trio_frontend.text.tokenizer import Tokenizer

__all__ = ["GenerationDefaults", "ModelFiles", "ModelFilesError", "is_multimodal", "read_config"]

_Find = Callable[[str], "Path | None"]


class ModelFilesError(ValueError):
    """A model's files cannot be found or read. The message names the file, or the repository, and what is wrong."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request gets where it says nothing; None: the neutral value. The fields are vLLM's of generation_config.json.

    A default temperature is no part of it: over gRPC an unset temperature is 0.
    """

    max_new_tokens: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> GenerationDefaults:
        """The known fields of a generation_config. Raises ModelFilesError for one that is no number in its range."""
        known: dict[str, Any] = {}
        for name, (kind, least, most) in _RANGES.items():
            value = values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ModelFilesError(f"generation_config: {name} must be a number in [{least:g}, {most:g}], got {value!r}")
            known[name] = kind(value)
        if known.get("top_k") == -1:
            known["top_k"] = 0
        return cls(**known)


_RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 1, 2**32 - 1),
    "top_k": (int, -1, 2**32 - 1),
    "top_p": (float, math.ulp(0.0), 1.0),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, math.ulp(0.0), math.inf),
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """See the module.

    ``vocab_size`` is the model's (config.json), which may be larger than the tokenizer's: ids below it are valid. ``eos_token_id`` is
    None for a model whose files name no end. ``max_position`` is the longest context in tokens that config.json states.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_id: int | None = None
    extra_eos_token_ids: tuple[int, ...] = ()
    generation_defaults: GenerationDefaults = GenerationDefaults()
    max_position: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        hf_config_path: str | os.PathLike[str] | None = None,
        revision: str | None = None,
    ) -> ModelFiles:
        """Read the files of ``model``, a directory or the id of a repository.

        ``tokenizer`` is where its tokenizer files are, if elsewhere (a tokenizer.json itself, too); ``hf_config_path`` where config.json
        and generation_config.json are. Raises ModelFilesError. Reads files, and the network for a repository that is not cached.
        """
        find_tokenizer = _finder(tokenizer if tokenizer is not None else model, revision)
        find_config = _finder(hf_config_path if hf_config_path is not None else model, revision)
        tokenizer_path = _tokenizer_file(tokenizer) or find_tokenizer("tokenizer.json")
        if tokenizer_path is None:
            raise ModelFilesError(f"{os.fspath(tokenizer or model)}: there is no tokenizer.json")
        try:
            loaded = Tokenizer.from_file(tokenizer_path)
        except (OSError, ValueError) as error:
            raise ModelFilesError(str(error)) from error
        config = _read_json(find_config("config.json"))
        generation_config = _read_json(find_config("generation_config.json"))
        tokenizer_config = _read_json(find_tokenizer("tokenizer_config.json"))
        # A multimodal model keeps its language model's settings one level down.
        language = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
        eos = _eos_token_ids(loaded, tokenizer_config, language, generation_config)
        return cls(
            name=os.fspath(model),
            tokenizer=loaded,
            vocab_size=_positive(language, "vocab_size") or loaded.vocab_size,
            eos_token_id=eos[0] if eos else None,
            extra_eos_token_ids=tuple(eos[1:]),
            generation_defaults=GenerationDefaults.from_mapping(generation_config),
            max_position=_positive(language, "max_position_embeddings"),
            config=config,
        )


def read_config(model: str | os.PathLike[str], *, revision: str | None = None) -> dict[str, Any]:
    """A model's config.json alone; empty if it has none. Reads and raises as :meth:`ModelFiles.load` does."""
    return _read_json(_finder(model, revision)("config.json"))


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json takes images, video or audio beside text.

    An engine does not say, and vLLM knows it by the model's class. The configs of such models describe an encoder, or name the token
    that stands for what it encodes.
    """
    return any(re.match(r"(mm_|image_|img_processor|video_|audio_|vision_|speech_|thinker_config)", name) for name in config)


def _tokenizer_file(path: str | os.PathLike[str] | None) -> Path | None:
    return Path(path) if path is not None and os.fspath(path).endswith(".json") and Path(path).is_file() else None


def _finder(model: str | os.PathLike[str], revision: str | None) -> _Find:
    directory = Path(model)
    if directory.is_dir():
        return lambda name: path if (path := directory / name).is_file() else None
    if directory.is_file():
        return lambda name: path if (path := directory.with_name(name)).is_file() else None
    name = os.fspath(model)
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or "\\" in name:
        raise ModelFilesError(f"{name}: there is no such directory")
    return lambda file: _from_hub(name, file, revision)


def _from_hub(repository: str, file: str, revision: str | None) -> Path | None:
    """The cached or downloaded file, or None if the repository has no such file."""
    import huggingface_hub  # here, since it takes a quarter of a second, and most models are directories
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
    except LocalEntryNotFoundError as error:
        # Offline, or the hub cannot be reached. A file that a cached repository lacks is no error.
        if isinstance(huggingface_hub.try_to_load_from_cache(repository, "config.json", revision=revision), str):
            return None
        raise ModelFilesError(
            f"{repository}: no such directory, and the repository is neither cached nor reachable"
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFilesError(f"{repository}: no such directory, and the Hugging Face hub says: {reason}") from error


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path}: a JSON object is needed, not {type(content).__name__}")
    return content


def _positive(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFilesError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _eos_token_ids(tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any], *configs: Mapping[str, Any]) -> list[int]:
    """All ids that end a text, the model's own EOS first, each once."""
    ids: list[int] = []
    token = tokenizer_config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and (token_id := tokenizer.token_to_id(token)) is not None:
        ids.append(token_id)
    for config in configs:
        stated = config.get("eos_token_id")
        for token_id in stated if isinstance(stated, list) else [stated]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                ids.append(token_id)
    return list(dict.fromkeys(ids))
