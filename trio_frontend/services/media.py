"""Media of a request: preprocessed features, checked to the last tensor and passed to the engine. Pure functions.

A model's processor (of Dynamo, of a gateway) has already made tensors of an image, a video or a sound; ``features.kwargs`` holds
them in MessagePack, in the form in which vLLM itself sends them to its engine core (``MultiModalKwargsItem`` in
``vllm/v1/serial_utils.py``): a map of name to ``{"data": TENSORS, "field": [FACTORY, ARGUMENTS]}``, TENSORS being a number, a list of
TENSORS, or ``[dtype, shape, bytes]``. An engine core dies of what it cannot decode, and it would unpickle some extension types, so
everything in there is checked. Media to be fetched or processed here are refused: that is a processor's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.errors import InvalidRequestError, shown

__all__ = ["check_media"]

_MODALITIES = {pb.MODALITY_IMAGE: "image", pb.MODALITY_VIDEO: "video", pb.MODALITY_AUDIO: "audio"}
_RAW_VIEW = 3
"""The extension type of raw bytes; types 1 and 2 are pickles."""
_ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Torch's names of dtypes, and bytes of an element."""
_MAX_ELEMENTS = 2**31
"""Of a tensor, sizes of 0 not counted: torch refuses what it could not address, whether there is data or not."""
_MAX_DIMENSIONS = 64
_FACTORIES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "batched": (frozenset(), frozenset(("keep_on_cpu",))),
    "flat": (frozenset(("slices",)), frozenset(("dim", "keep_on_cpu"))),
    "shared": (frozenset(("batch_size",)), frozenset(("keep_on_cpu",))),
}
"""The arguments that each needs, and those that it may have."""
_MAX_NESTING = 8


def check_media(
    media: Sequence[pb.MediaItem], prompt_length: int, *, token_ids_given: bool, supports_multimodal: bool
) -> list[dict[str, Any]]:
    """The engine's ``mm_features``, one for each item; ``prompt_length`` in tokens. Raises InvalidRequestError naming the item."""
    for index, item in enumerate(media):
        if item.modality not in _MODALITIES:
            raise InvalidRequestError(f"media[{index}].modality must be image, video or audio, got {item.modality}")
        source = item.WhichOneof("source")
        if source is None:
            raise InvalidRequestError(f"media[{index}] must have a source: url, data_uri, raw_bytes or features")
        if source == "features" and not item.features.HasField("kwargs"):
            raise InvalidRequestError(
                f"media[{index}].features.kwargs is required: features from an engine's cache are not supported"
            )
    if not token_ids_given:
        raise InvalidRequestError(
            "media must come with a prompt of token_ids, in which the placeholders stand, not with text"
        )
    if not supports_multimodal:
        raise InvalidRequestError(f"media: the model takes no media, got {len(media)} items")
    return [_feature(f"media[{index}]", item, prompt_length) for index, item in enumerate(media)]


def _feature(where: str, item: pb.MediaItem, prompt_length: int) -> dict[str, Any]:
    source = item.WhichOneof("source")
    if source != "features":
        raise InvalidRequestError(f"{where}.{source} is not supported: send features that the model's processor has made")
    features = item.features
    if not features.identifier:
        raise InvalidRequestError(f"{where}.features.identifier is required, got ''")
    end = features.offset + features.length
    if not features.length or end > prompt_length:
        raise InvalidRequestError(
            f"{where}.features: offset {features.offset} and length {features.length} must be a range of one token or more "
            f"inside the prompt of {prompt_length} tokens"
        )
    if features.is_embed and len(features.is_embed) != features.length:
        raise InvalidRequestError(
            f"{where}.features.is_embed must be empty or have {features.length} entries, one for each token of the placeholder, "
            f"got {len(features.is_embed)}"
        )
    mask = bytes(features.is_embed) if features.is_embed else None
    return {
        "data": _kwargs(f"{where}.features.kwargs", features.kwargs),
        "modality": _MODALITIES[item.modality],
        "identifier": features.identifier,
        "mm_position": {
            "offset": features.offset,
            "length": features.length,
            "is_embed": None if mask is None else ["bool", [len(mask)], msgspec.msgpack.Ext(_RAW_VIEW, mask)],
        },
        "mm_hash": features.mm_hash if features.HasField("mm_hash") else None,
    }


def _kwargs(where: str, packed: bytes) -> dict[str, Any]:
    try:
        kwargs = msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is no MessagePack: {error}") from None
    if not isinstance(kwargs, dict) or not kwargs:
        raise InvalidRequestError(f"{where} must be a map with at least one entry")
    for name, element in kwargs.items():
        if not isinstance(name, str) or not isinstance(element, dict) or set(element) != {"data", "field"}:
            raise InvalidRequestError(f"{where}: {shown(name)} must be a map of data and field")
        _check_tensors(f"{where}: {name}.data", element["data"], _MAX_NESTING)
        _check_field(f"{where}: {name}.field", element["field"])
    return kwargs


def _check_tensors(where: str, value: Any, depth: int) -> None:
    if isinstance(value, int | float):
        return
    if not isinstance(value, list) or not depth:
        raise InvalidRequestError(
            f"{where} must be a number, a tensor or a list of those, nested at most {_MAX_NESTING} levels"
        )
    if not value or not isinstance(value[0], str):
        for item in value:
            _check_tensors(where, item, depth - 1)
        return
    if len(value) != 3:
        raise InvalidRequestError(f"{where}: a tensor must be a dtype, a shape and bytes, got {len(value)} parts")
    dtype, shape, data = value
    if dtype not in _ITEM_SIZES:
        raise InvalidRequestError(f"{where}: a tensor's dtype must be one of {', '.join(_ITEM_SIZES)}, got {shown(dtype)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequestError(f"{where}: a tensor's shape must be a list of sizes, got {shown(shape)}")
    if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise InvalidRequestError(
            f"{where}: a tensor must have at most {_MAX_DIMENSIONS} dimensions and {_MAX_ELEMENTS} elements, got {shown(shape)}"
        )
    if not isinstance(data, msgspec.msgpack.Ext) or data.code != _RAW_VIEW:
        raise InvalidRequestError(f"{where}: a tensor's data must be inline, an extension of type {_RAW_VIEW}")
    expected, length = math.prod(shape) * _ITEM_SIZES[dtype], memoryview(data.data).nbytes
    if length != expected:
        raise InvalidRequestError(f"{where}: a tensor of {dtype} {shape} must have {expected} bytes, got {length}")


def _check_field(where: str, value: Any) -> None:
    """The factory's name and its arguments, as ``vllm.multimodal.inputs.MultiModalFieldConfig`` has them: the engine calls it with them."""
    match value:
        case [str(factory), dict(arguments)] if factory in _FACTORIES:
            pass
        case _:
            raise InvalidRequestError(
                f"{where} must be one of {', '.join(_FACTORIES)} and its arguments, got {shown(value)}"
            )
    required, optional = _FACTORIES[factory]
    for name in required - arguments.keys():
        raise InvalidRequestError(f"{where}: {factory} needs the argument {name}")
    for name, argument in arguments.items():
        if name not in required | optional:
            raise InvalidRequestError(f"{where}: {factory} has no argument {shown(name)}")
        if not _ARGUMENTS[name](argument):
            raise InvalidRequestError(f"{where}: the argument {name} of {factory} must not be {shown(argument)}")


def _is_integer(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_slice(value: Any) -> bool:
    """Start, stop and step, as the arguments of ``slice``."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= 3
        and all(bound is None or _is_integer(bound, -(2**31), 2**31 - 1) for bound in value)
    )


def _are_slices(value: Any) -> bool:
    """One for each item, or for each item one for each dimension."""
    if not isinstance(value, list) or not value:
        return False
    return all(map(_is_slice, value)) or all(isinstance(row, list) and row and all(map(_is_slice, row)) for row in value)


_ARGUMENTS: Mapping[str, Callable[[Any], bool]] = {
    "slices": _are_slices,
    "dim": lambda value: _is_integer(value, -64, 63),
    "batch_size": lambda value: _is_integer(value, 1, 2**31 - 1),
    "keep_on_cpu": lambda value: isinstance(value, bool),
}
