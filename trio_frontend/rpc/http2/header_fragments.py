"""A header block in fragments: HEADERS and the CONTINUATIONs that must follow it at once (RFC 9113 4.3 and 6.10).

Rules:
- Between the first fragment and the last, no other frame may come, on any stream.
- Length and number of the fragments are counted as they come, before anything is decoded.
"""

from __future__ import annotations

from trio_frontend.rpc.http2.errors import ErrorCode, ProtocolError
from trio_frontend.rpc.http2.limits import Limits


class HeaderFragments:
    """The unfinished header block of a connection, if there is one (`stream_id` is not 0)."""

    __slots__ = ("_fragments", "_length", "_max_fragments", "_max_length", "ends_stream", "stream_id")

    def __init__(self, limits: Limits) -> None:
        self._max_length = limits.max_header_block
        self._max_fragments = limits.max_continuations + 1
        self._fragments: list[bytes] = []
        self._length = 0
        self.stream_id = 0
        self.ends_stream = False

    def begin(self, stream_id: int, ends_stream: bool) -> None:
        self.stream_id = stream_id
        self.ends_stream = ends_stream

    def add(self, fragment: bytes) -> None:
        """Raises ProtocolError(ENHANCE_YOUR_CALM) if there are too many, or they are too long."""
        self._fragments.append(fragment)
        self._length += len(fragment)
        if self._length > self._max_length:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "header block too long")
        if len(self._fragments) > self._max_fragments:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")

    def take(self) -> bytes:
        """The whole block; afterwards there is none."""
        block = b"".join(self._fragments)
        self.clear()
        return block

    def clear(self) -> None:
        self._fragments.clear()
        self._length = 0
        self.stream_id = 0
