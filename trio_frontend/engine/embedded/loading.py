"""A model's directory, read: the ONNX session and what the engine must know of its configuration. Blocking."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trio_frontend.engine.embedded.session import DecoderSession, Session, SignatureError

__all__ = ["SHIPPED_MODEL", "LoadedModel", "UnreadableModelError", "load_model"]

SHIPPED_MODEL = Path(__file__).parent / "model"
"""The small model that comes with the package."""

# Where the graph may lie: as optimum exports it, and as model hubs often keep it.
_GRAPH_FILES = ("model.onnx", "onnx/model.onnx")
# The names under which model families keep the longest context, in tokens.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
# Up to this size of weights a second thread costs more than it gives.
_ONE_THREAD_BYTES = 100 * 2**20


class UnreadableModelError(Exception):
    """A model's directory cannot be served. ``path`` is the file (or directory), ``reason`` what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot read the model: {path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``max_model_len`` in tokens, prompt and answer together; ``eos_token_ids`` may be empty."""

    session: Session
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_file: Path
    max_batch_rows: int = 1
    """How many sequences one call may run together without changing any row's numbers."""


def load_model(directory: Path, threads: int | None = None, max_batch_rows: int = 16) -> LoadedModel:
    """Load an exported decoder: model.onnx, config.json and, optional, generation_config.json; tokenizer.json is read when needed.

    ``threads`` for one operator, None chooses by the size of the weights. Raises UnreadableModelError.
    """
    if not directory.is_dir():
        raise UnreadableModelError(directory, "no such directory")
    graph = next((directory / name for name in _GRAPH_FILES if (directory / name).is_file()), None)
    if graph is None:
        raise UnreadableModelError(directory / _GRAPH_FILES[0], "no such file")
    config_file = directory / "config.json"
    config = _read_json(config_file)
    if isinstance(config.get("text_config"), dict):  # a multimodal model keeps its language model's settings one level down
        config = {**config, **config["text_config"]}
    max_model_len = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    if max_model_len is None or max_model_len < 2:
        raise UnreadableModelError(config_file, f"none of {', '.join(_CONTEXT_KEYS)} says how long the context is")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    eos_token_ids = tuple(dict.fromkeys((*_eos(config_file, config), *_eos(generation_file, generation))))
    session = _open_session(graph, threads)
    return LoadedModel(
        session,
        max_model_len,
        eos_token_ids,
        directory / "tokenizer.json",
        max_batch_rows if max_batch_rows > 1 and session.rows_are_independent(max_batch_rows, max_model_len) else 1,
    )


def _open_session(graph: Path, threads: int | None) -> DecoderSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; a warning of the optimizer is of no use to who serves the model
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = threads if threads is not None else _threads_for(graph)
    # Threads that spin while they wait for work would take the CPU from Trio between two steps.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        return DecoderSession(session)
    except SignatureError as error:
        raise UnreadableModelError(graph, str(error)) from None
    except Exception as error:
        # ONNX Runtime's exceptions share no base but Exception.
        raise UnreadableModelError(graph, str(error).strip() or type(error).__name__) from error


def _threads_for(graph: Path) -> int:
    weights = sum(file.stat().st_size for file in graph.parent.iterdir() if file.is_file())
    return 1 if weights <= _ONE_THREAD_BYTES else max(1, (os.cpu_count() or 1))


def _eos(path: Path, config: dict[str, Any]) -> list[int]:
    """A model's EOS ids: one, a list, or none."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise UnreadableModelError(path, f"eos_token_id must be a token id or a list of them, not {value!r}")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableModelError(path, "no such file") from None
    except (OSError, ValueError) as error:
        raise UnreadableModelError(path, str(error)) from error
    if not isinstance(content, dict):
        raise UnreadableModelError(path, "must hold a JSON object")
    return content
