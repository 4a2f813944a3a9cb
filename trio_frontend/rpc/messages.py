"""Length-prefixed messages: DATA bytes in, messages out; messages in, DATA bytes out.

Rules that hold here (gRPC over HTTP/2, "Length-Prefixed-Message"; gRPC's compression document):

* A message is one flag byte, four bytes of length, and that many bytes. It may be cut over DATA frames anywhere.
* A message's length is checked when its prefix is known, before any of it is kept; an unpacked message's length is checked
  while it is unpacked, so that a small bomb costs no more than the limit.
* What was buffered is acknowledged (given back to the peer's flow-control window) when the handler takes it, or while the handler
  waits for the rest of a message; so an unread request costs one stream window.
* Encodings are identity and gzip. A compressed flag without an encoding is an error.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final

from trio_frontend.rpc.status import StatusCode, StatusError

__all__ = ["ACCEPT_ENCODING", "PREFIX_LENGTH", "GzipMessage", "MessageReader", "gzip_compress", "message_prefix"]

ACCEPT_ENCODING: Final = b"identity,gzip"
PREFIX_LENGTH: Final = 5

_PREFIX: Final = Struct(">BI")
_GZIP_WINDOW_BITS: Final = 31  # zlib's way to say: gzip, the largest window
_SMALL: Final = 65_536
"""Bytes that are unpacked there and then; larger messages are packed and unpacked in a thread, so that they hold up nobody."""

_GZIP_LEVEL: Final = (
    1  # text messages are small and latency counts: level 6 packs a few percent better at three times the CPU
)

_unpack_prefix = _PREFIX.unpack_from
message_prefix = _PREFIX.pack
"""``message_prefix(compressed, length)``: the five bytes before a message."""


class MessageReader:
    """The messages of one request, put together from its DATA frames.

    ``feed`` what arrives, ask ``ready`` whether ``take`` would give something new, and give the peer ``release()`` bytes of window
    back. Memory: the bytes fed and not taken. ``limit`` is the largest message in bytes, packed and unpacked.
    """

    __slots__ = ("_buffer", "_encoding", "_limit", "_needed", "_unreleased", "ended")

    def __init__(self, limit: int, encoding: bytes = b"identity") -> None:
        self._limit = limit
        self._encoding = encoding
        self._buffer: bytes | bytearray = b""
        self._needed = PREFIX_LENGTH
        self._unreleased = 0
        self.ended = False

    def feed(self, data: bytes, flow_controlled_length: int) -> None:
        """``flow_controlled_length`` is what the frame took from the window: ``data`` and its padding."""
        self._unreleased += flow_controlled_length
        if not self._buffer:
            self._buffer = data
        elif isinstance(self._buffer, bytearray):
            self._buffer += data
        else:
            self._buffer = bytearray(self._buffer)
            self._buffer += data

    @property
    def ready(self) -> bool:
        """Whether ``take`` has something to say: a message, an error, or that there will be no more."""
        buffered = len(self._buffer)
        if buffered < self._needed:
            return self.ended
        if self._needed == PREFIX_LENGTH:
            flag, length = _unpack_prefix(self._buffer)
            if length > self._limit or flag > 1:
                return True
            self._needed = PREFIX_LENGTH + length
            return buffered >= self._needed or self.ended
        return True

    @property
    def holds_one_message(self) -> bool:
        """Whether the request is complete and has exactly one message, not compressed, as far as its prefix tells."""
        buffered = len(self._buffer)
        if not self.ended or buffered < PREFIX_LENGTH:
            return False
        flag, length = _unpack_prefix(self._buffer)
        return bool(flag == 0 and buffered == PREFIX_LENGTH + length)

    def take(self) -> tuple[int, bytes] | None:
        """The next message as (compressed flag, bytes), or None if it is not all there (``ended``: or if there are no more).

        Raises StatusError: RESOURCE_EXHAUSTED for a message over the limit, INTERNAL for a broken prefix or a message cut short
        by the end of the request.
        """
        buffer = self._buffer
        buffered = len(buffer)
        if buffered < self._needed:
            if self.ended and buffered:
                raise StatusError(StatusCode.INTERNAL, "request ended inside a message")
            return None
        flag, length = _unpack_prefix(buffer)
        if flag > 1:
            raise StatusError(StatusCode.INTERNAL, f"malformed message: compressed flag is {flag}, expected 0 or 1")
        if flag and self._encoding == b"identity":
            raise StatusError(StatusCode.INTERNAL, "compressed message without grpc-encoding")
        if length > self._limit:
            raise StatusError(StatusCode.RESOURCE_EXHAUSTED, f"message of {length} bytes is over the limit of {self._limit}")
        end = PREFIX_LENGTH + length
        if buffered < end:
            self._needed = end
            if self.ended:
                raise StatusError(StatusCode.INTERNAL, "request ended inside a message")
            return None
        self._needed = PREFIX_LENGTH
        if buffered == end:
            self._buffer = b""
            if isinstance(buffer, bytes):
                return flag, buffer[PREFIX_LENGTH:]
        with memoryview(buffer) as view:
            message = bytes(view[PREFIX_LENGTH:end])
        if buffered > end:
            if isinstance(buffer, bytes):
                buffer = self._buffer = bytearray(buffer)
            del buffer[:end]
        return flag, message

    def release(self, waiting: bool) -> int:
        """Bytes of window to give back now: those taken, or, while the handler is ``waiting`` for the rest of a message, all.

        The newest bytes fed are the last to be given back.
        """
        kept = 0 if waiting else min(len(self._buffer), self._unreleased)
        released = self._unreleased - kept
        self._unreleased = kept
        return released

    def discard(self) -> None:
        """Forget what is buffered: nobody will take it."""
        self._buffer = b""


def gzip_compress(message: bytes) -> bytes:
    """``message`` as one gzip member."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    return packer.compress(message) + packer.flush()


class GzipMessage:
    """One packed message and its way out: ``begin``, and, if that was not all, ``finish``.

    Raises StatusError: RESOURCE_EXHAUSTED as soon as the message grows over ``limit`` bytes, INTERNAL if it is not gzip, or not one
    whole member.
    """

    __slots__ = ("_limit", "_parts", "_rest", "_unpacker")

    def __init__(self, packed: bytes, limit: int) -> None:
        self._unpacker = zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._rest = packed
        self._parts: list[bytes] = []
        self._limit = limit

    def begin(self) -> bytes | None:
        """The message, if it is small; otherwise None, and the rest takes long enough to be worth a thread."""
        self._unpack(min(_SMALL, self._limit) + 1)
        return self._message() if self._unpacker.eof else None

    def finish(self) -> bytes:
        """The message, whatever its size: milliseconds for each megabyte."""
        self._unpack(self._limit + 1 - len(self._parts[0]))
        return self._message()

    def _unpack(self, size: int) -> None:
        try:
            self._parts.append(self._unpacker.decompress(self._rest, size) if size > 0 else b"")
        except zlib.error:
            raise StatusError(StatusCode.INTERNAL, "compressed message is not gzip") from None
        self._rest = self._unpacker.unconsumed_tail
        if sum(map(len, self._parts)) > self._limit:
            raise StatusError(
                StatusCode.RESOURCE_EXHAUSTED, f"message is over the limit of {self._limit} bytes when unpacked"
            )

    def _message(self) -> bytes:
        if not self._unpacker.eof or self._unpacker.unused_data:
            raise StatusError(StatusCode.INTERNAL, "compressed message is not one whole gzip member")
        return b"".join(self._parts)
