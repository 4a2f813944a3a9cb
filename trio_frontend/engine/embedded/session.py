"""The model as a function: token ids and a KV cache in, logits and a longer KV cache out. Blocking; runs in a worker thread.

Rules that hold here:

* No padding. The rows of one call have the same past length, so any exported decoder works, whatever it does with masks.
* A cache belongs to its rows and holds exactly their tokens. The exported graph appends by giving back past and new tokens
  as fresh arrays; that copy is inherent in the layout, and none is added: what came out is what goes in next.
* A row's numbers do not depend on the other rows of its call. :meth:`DecoderSession.rows_are_independent` tries that out
  for this model on this machine; where it fails, sequences run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["DecoderSession", "KVCache", "Session", "SignatureError"]

FloatArray = npt.NDArray[np.float32]

_NUMPY_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


class SignatureError(ValueError):
    """The graph's inputs or outputs are not those of an exported decoder with a KV cache."""


class KVCache:
    """Keys and values of ``rows`` sequences of ``length`` tokens each: one array [rows, heads, length, dim] per past input."""

    __slots__ = ("arrays", "length", "rows")

    def __init__(self, arrays: list[npt.NDArray[Any]], rows: int, length: int) -> None:
        self.arrays = arrays
        self.rows = rows
        self.length = length

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def select(self, rows: Sequence[int]) -> KVCache:
        """A cache of these rows only (a copy, so that the others' memory is free)."""
        return KVCache([np.ascontiguousarray(array[list(rows)]) for array in self.arrays], len(rows), self.length)

    @staticmethod
    def concatenate(caches: Sequence[KVCache]) -> KVCache:
        """One cache of all rows; the lengths must be equal."""
        arrays = [np.concatenate(parts) for parts in zip(*(cache.arrays for cache in caches), strict=True)]
        return KVCache(arrays, sum(cache.rows for cache in caches), caches[0].length)


class Session(Protocol):
    """What the stepper needs of a model. A test may put its own in place of :class:`DecoderSession`."""

    vocab_size: int

    def empty_cache(self, rows: int) -> KVCache: ...

    def run(self, token_ids: npt.NDArray[np.int64], cache: KVCache) -> FloatArray:
        """Run the model on [rows, n] new tokens; ``cache`` grows by n. Returns logits, float32 [rows, n, vocab], the caller's own."""


class DecoderSession:
    """An ``onnxruntime.InferenceSession`` of a decoder in the usual exported layout.

    Inputs: input_ids, past_key_values.* and, each optional, attention_mask and position_ids. Outputs: logits, present.*.
    Ids, masks and positions may be int64 or int32; pasts float32 or float16. Raises SignatureError if that is not so.
    """

    def __init__(self, inference_session: Any) -> None:
        self._session = inference_session
        inputs = {node.name: node for node in inference_session.get_inputs()}
        outputs = {node.name: node for node in inference_session.get_outputs()}
        self._past_names = [name for name in inputs if name.startswith("past_key_values.")]
        present_names = [name.replace("past_key_values.", "present.", 1) for name in self._past_names]
        missing = [name for name in ("input_ids",) if name not in inputs]
        missing += [name for name in ("logits", *present_names) if name not in outputs]
        if missing:
            raise SignatureError(f"the graph has no {', '.join(missing)}")
        if not self._past_names:
            raise SignatureError("the graph has no past_key_values.* inputs; export it with its KV cache")
        known = {"input_ids", "attention_mask", "position_ids", *self._past_names}
        unknown = [name for name in inputs if name not in known]
        if unknown:
            raise SignatureError(f"the graph has unknown inputs: {', '.join(unknown)}")
        self._output_names = ["logits", *present_names]
        self._types = {name: _numpy_type(name, node.type) for name, node in inputs.items()}
        _numpy_type("logits", outputs["logits"].type)
        self._has_mask = "attention_mask" in inputs
        self._has_positions = "position_ids" in inputs
        self._past_shapes = [_past_shape(name, inputs[name].shape) for name in self._past_names]
        vocab_size = outputs["logits"].shape[-1]
        if isinstance(vocab_size, int):
            self.vocab_size = vocab_size
        else:  # the export left the last dimension symbolic: the model itself knows
            self.vocab_size = 0
            self.vocab_size = self.run(np.zeros((1, 1), np.int64), self.empty_cache(1)).shape[-1]

    def empty_cache(self, rows: int) -> KVCache:
        arrays = [
            np.zeros((rows, heads, 0, dim), self._types[name])
            for name, (heads, dim) in zip(self._past_names, self._past_shapes, strict=True)
        ]
        return KVCache(arrays, rows, 0)

    def run(self, token_ids: npt.NDArray[np.int64], cache: KVCache) -> FloatArray:
        rows, new = token_ids.shape
        total = cache.length + new
        feeds: dict[str, npt.NDArray[Any]] = dict(zip(self._past_names, cache.arrays, strict=True))
        feeds["input_ids"] = token_ids.astype(self._types["input_ids"], copy=False)
        if self._has_mask:
            feeds["attention_mask"] = np.ones((rows, total), self._types["attention_mask"])
        if self._has_positions:
            positions = np.arange(cache.length, total, dtype=self._types["position_ids"])
            feeds["position_ids"] = positions[None] if rows == 1 else np.tile(positions, (rows, 1))
        logits, *cache.arrays = self._session.run(self._output_names, feeds)
        cache.length = total
        result: FloatArray = logits.astype(np.float32, copy=False)
        return result

    def rows_are_independent(self, most_rows: int, most_tokens: int) -> bool:
        """Whether a row gives bit for bit the same alone and among others, tried on a few shapes (a few milliseconds)."""
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, self.vocab_size, (3, 24))
        for length in (1, 6, 23):
            if length >= most_tokens:
                break
            caches = [self.empty_cache(1) for _ in prompts]
            for prompt, cache in zip(prompts, caches, strict=True):
                self.run(prompt[None, :length], cache)
            last = prompts[:, length : length + 1]
            alone = [KVCache(list(cache.arrays), 1, length) for cache in caches]
            logits = [self.run(last[row : row + 1], cache)[0] for row, cache in enumerate(alone)]
            for count in {2, 3, 4, 5, 7, most_rows}:
                picks = [row % len(prompts) for row in range(count)]
                together = KVCache.concatenate([caches[pick] for pick in picks])
                many = self.run(last[picks], together)
                for row, pick in enumerate(picks):
                    if not np.array_equal(many[row], logits[pick]) or not all(
                        np.array_equal(array[row], single[0])
                        for array, single in zip(together.arrays, alone[pick].arrays, strict=True)
                    ):
                        return False
        return True


def _numpy_type(name: str, onnx_type: str) -> Any:
    try:
        return _NUMPY_TYPES[onnx_type]
    except KeyError:
        raise SignatureError(f"{name} is of type {onnx_type}; float, float16, int32 and int64 can be used") from None


def _past_shape(name: str, shape: Sequence[int | str | None]) -> tuple[int, int]:
    """(heads, dim) of a past input [batch, heads, past, dim]."""
    if len(shape) == 4:
        heads, dim = shape[1], shape[3]
        if isinstance(heads, int) and isinstance(dim, int):
            return heads, dim
    raise SignatureError(f"{name} has the shape {list(shape)}; [batch, heads, past, dim] with fixed heads and dim is needed")
