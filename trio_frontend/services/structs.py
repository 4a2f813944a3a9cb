"""Free-form parameters: protobuf's Struct to plain Python and back. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trio_frontend.protos.google.protobuf import struct_pb2
from trio_frontend.services.errors import InvalidRequestError

__all__ = ["mapping_of_struct", "struct_of_mapping"]

_MAX_WHOLE = 2**63
"""Whole numbers beyond 64 bits stay floats: MessagePack has no larger integers."""
_MAX_SIZE = 2**20
"""Bytes of transfer parameters: the ids of some 80,000 blocks. Each value takes a microsecond or two of the loop."""
_MAX_NESTING = 48
"""Levels of a transfer parameter; engine clients and engines walk them recursively."""


def mapping_of_struct(field: str, struct: struct_pb2.Struct) -> dict[str, Any]:
    """Plain Python of a Struct. Its numbers are doubles; whole ones become ints, as an engine expects of ids and ports."""
    size = struct.ByteSize()
    if size > _MAX_SIZE:
        raise InvalidRequestError(f"{field} must have at most {_MAX_SIZE} bytes, got {size}")
    return {key: _plain(field, value, _MAX_NESTING) for key, value in struct.fields.items()}


def _plain(field: str, value: struct_pb2.Value, depth: int) -> Any:
    if not depth:
        raise InvalidRequestError(f"{field} must be nested at most {_MAX_NESTING} levels")
    kind = value.WhichOneof("kind")
    match kind:
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidRequestError(f"{field} must hold finite numbers, got {number}")
            return int(number) if number.is_integer() and -_MAX_WHOLE <= number < _MAX_WHOLE else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return {key: _plain(field, item, depth - 1) for key, item in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(field, item, depth - 1) for item in value.list_value.values]
        case _:
            return None


def struct_of_mapping(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """A Struct of an engine's own parameters; what a Struct cannot hold (bytes, odd keys) becomes its text."""
    struct = struct_pb2.Struct()
    for key, value in values.items():
        _fill(struct.fields[str(key)], value, _MAX_NESTING)
    return struct


def _fill(target: struct_pb2.Value, value: Any, depth: int) -> None:
    if value is None or not depth:
        target.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        target.number_value = value
    elif isinstance(value, Mapping):
        target.struct_value.SetInParent()
        for key, item in value.items():
            _fill(target.struct_value.fields[str(key)], item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        target.list_value.SetInParent()
        for item in value:
            _fill(target.list_value.values.add(), item, depth - 1)
    else:
        target.string_value = value if isinstance(value, str) else str(value)
