"""grpc-timeout: how long a call may take, counted from its headers.

Rule: ``Timeout -> "grpc-timeout" TimeoutValue TimeoutUnit``, a value of one to eight ASCII digits and one unit of ``H M S m u n``
(gRPC over HTTP/2, "Requests"). Anything else is an error, never a guess.
"""

from __future__ import annotations

from typing import Final

__all__ = ["parse_timeout"]

_SECONDS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def parse_timeout(value: bytes) -> float:
    """The seconds that a grpc-timeout header's ``value`` stands for. Raises ValueError for a value that is none."""
    digits, unit = value[:-1], value[-1:]
    if unit not in _SECONDS or not 1 <= len(digits) <= 8 or not digits.isdigit():
        raise ValueError(f"malformed grpc-timeout {value[:32]!r}: expected 1 to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * _SECONDS[unit]
