"""Frames of messages for tests of decoding, without a socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np


@dataclass
class Frame:
    """A received frame, as far as decoding looks at it."""

    buffer: memoryview


def frames(*parts: bytes) -> list[Frame]:
    return [Frame(memoryview(part)) for part in parts]


def message(*elements: Any) -> list[Frame]:
    """One frame with ``elements`` as an array."""
    return frames(msgspec.msgpack.encode(elements))


def inline(array: np.ndarray, dtype: str | None = None) -> list[Any]:
    """An array as engines send small ones."""
    return [dtype or array.dtype.str, list(array.shape), msgspec.msgpack.Ext(3, array.tobytes())]
