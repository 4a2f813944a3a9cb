"""The messages of one call, both ways: what backpressure, flow control and cancellation mean for them.

Rules that hold here:

* Once the stream is closed nothing is sent: ``try_send_bytes`` returns False, ``send`` raises trio.BrokenResourceError, and what
  waits wakes up to find out, also behind a shield.
* ``try_send_bytes`` is the fast path: it never waits. What it declines goes the plain way, in pieces, whole messages one after another.
* A message that could not be sent whole leaves the stream unusable for further ones.
* What is received is given back to the client's window as the handler takes it. Memory of a call: one stream window; one message
  of at most ``max_message_size`` while it is put together; and one message for each task that sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import trio
from google.protobuf.message import DecodeError

from trio_frontend.rpc.flush import CHUNK
from trio_frontend.rpc.http2 import encode_headers
from trio_frontend.rpc.messages import ACCEPT_ENCODING, GzipMessage, MessageReader, gzip_compress, message_prefix
from trio_frontend.rpc.metadata import MetadataValue, encode_metadata
from trio_frontend.rpc.status import StatusCode, StatusError
from trio_frontend.rpc.waiting import Waiter

if TYPE_CHECKING:
    from trio_frontend.rpc.connection import Connection
    from trio_frontend.rpc.dispatch import Request

__all__ = ["RESPONSE_BLOCK", "CallStream", "Message"]

_RESPONSE: Final = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", ACCEPT_ENCODING)]
RESPONSE_BLOCK: Final = encode_headers(_RESPONSE)
_RESPONSE_GZIP_BLOCK: Final = encode_headers([*_RESPONSE, (b"grpc-encoding", b"gzip")])


class Message(Protocol):
    """A protobuf message, as far as sending goes."""

    def SerializeToString(self) -> bytes: ...


class CallStream:
    """A call's HTTP/2 stream: messages in, messages out."""

    __slots__ = (
        "_broken",
        "_connection",
        "_gzip",
        "_headers_sent",
        "_open",
        "_reader",
        "_receiving",
        "_request",
        "_send_lock",
        "_sending",
        "_sent",
        "compress",
        "received_compressed",
        "stream_id",
    )

    def __init__(self, connection: Connection, stream_id: int, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._reader = MessageReader(connection.limits.max_message_size, request.encoding)
        self._receiving = Waiter()
        self._sending = Waiter()
        self._send_lock: trio.Lock | None = None
        self._open = True  # the stream takes our frames
        self._broken = False  # a message was cut
        self._headers_sent = False
        self._sent = False  # a message was sent whole
        self._gzip = False
        self.compress = True
        """Whether messages from here on are compressed, if the response is (see :meth:`use_gzip`). May change between messages."""
        self.received_compressed = False
        """Whether the message received last was compressed."""
        self.stream_id = stream_id

    # --- the connection's side ---

    def data_received(self, data: bytes, flow_controlled_length: int, end_stream: bool) -> None:
        """A part of the request. Wakes the handler when it makes a message whole, gives the window back while it does not."""
        reader = self._reader
        reader.feed(data, flow_controlled_length)
        if end_stream:
            reader.ended = True
        if self._receiving.waiting:
            if reader.ready:
                self._receiving.wake()
            else:
                self._release(waiting=True)

    def request_ended(self) -> None:
        self._reader.ended = True
        self._receiving.wake()

    def stream_closed(self) -> None:
        """The stream is gone, by whoever's doing: nothing more goes out or comes in. What waits behind a shield finds out."""
        self._open = False
        self._reader.discard()
        self._receiving.wake()
        self._sending.wake()

    # --- receiving ---

    async def receive(self) -> Any:
        """The request's next message, or None when there are no more.

        Raises StatusError for a message that is broken (INTERNAL) or too large (RESOURCE_EXHAUSTED), trio.BrokenResourceError if
        the stream was closed, trio.BusyResourceError if another task receives.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._reader.ready:
            await self._wait_for_message()
        taken = self._reader.take()
        self._release(waiting=False)
        if taken is None:
            return None
        flag, message = taken
        self.received_compressed = bool(flag)
        if flag:
            message = await self._unpack(message)
        return self._parse(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    def take_only_message(self) -> Any:
        """The request's message if it is complete and the only one, otherwise None and nothing is taken. Does not wait."""
        reader = self._reader
        if not reader.holds_one_message:
            return None
        taken = reader.take()
        self._release(waiting=False)
        return None if taken is None else self._parse(taken[1])

    async def _wait_for_message(self) -> None:
        self._release(waiting=True)
        while not self._reader.ready:
            if not self._open:
                raise trio.BrokenResourceError("the call has ended")
            await self._receiving.wait()

    def _release(self, waiting: bool) -> None:
        released = self._reader.release(waiting)
        if released and self._open:
            self._connection.acknowledge(self.stream_id, released)

    async def _unpack(self, packed: bytes) -> bytes:
        message = GzipMessage(packed, self._connection.limits.max_message_size)
        unpacked = message.begin()
        if unpacked is None:
            unpacked = await trio.to_thread.run_sync(
                message.finish, abandon_on_cancel=True, limiter=self._connection.packing_threads
            )
        return unpacked

    def _parse(self, message: bytes) -> Any:
        try:
            return self._request.method.parse(message)
        except DecodeError as exc:
            raise StatusError(StatusCode.INTERNAL, "request message does not parse") from exc

    # --- sending ---

    async def send_initial_metadata(
        self, metadata: Mapping[str, MetadataValue] | Iterable[tuple[str, MetadataValue]] = ()
    ) -> None:
        """Send the response's headers now, with ``metadata``. Raises RuntimeError if they are sent already (by the first message),
        ValueError or TypeError for metadata that cannot be sent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        fields = encode_metadata(metadata)
        if self._headers_sent:
            raise RuntimeError("initial metadata has been sent already")
        if not self._open:
            raise trio.BrokenResourceError("the call has ended")
        self._send_headers(encode_headers(fields))
        self._connection.outbox.schedule()

    def use_gzip(self) -> bool:
        """Compress the response's messages, if the caller accepts gzip: True if so. To be called before the first message."""
        if self._headers_sent:
            raise RuntimeError("the response's encoding has been sent already")
        self._gzip = self._request.accepts_gzip
        return self._gzip

    async def send(self, message: Message) -> None:
        """Send ``message``, waiting while the client's windows are closed or the connection's buffer is full.

        Several tasks may send; their messages follow each other whole. Raises trio.BrokenResourceError if the stream was closed or a
        message was cut before, StatusError(RESOURCE_EXHAUSTED) if the client takes none of it for ``send_timeout`` seconds.
        """
        await self.send_bytes(message.SerializeToString())

    async def send_bytes(self, serialized: bytes) -> None:
        """Like :meth:`send`, for a message that is serialized already."""
        if self.try_send_bytes(serialized):
            await trio.lowlevel.checkpoint()
        else:
            await self._send_waiting(serialized)

    async def send_only(self, message: Message) -> None:
        """Send a unary method's answer; no checkpoint if nothing holds it back, since the call ends with it."""
        serialized = message.SerializeToString()
        if not self.try_send_bytes(serialized):
            await self._send_waiting(serialized)

    def try_send_bytes(self, serialized: bytes) -> bool:
        """Frame a serialized message into the connection's buffer there and then, if its windows are open, the buffer is low and no
        other message of this call waits; otherwise False, and nothing is sent. Also False when the call has ended.

        Never waits, never raises; may be called from any task of the same Trio run. The write follows in the next loop turn, one for
        all that was framed until then.
        """
        connection = self._connection
        if not self._open or self._broken or not connection.outbox.has_room:
            return False
        if self._send_lock is not None and self._send_lock.locked():
            return False
        if not self._headers_sent:
            self._send_headers()
        compressed = 0
        if self._gzip and self.compress:
            if len(serialized) > CHUNK:
                return False
            compressed, serialized = 1, gzip_compress(serialized)
        prefix = message_prefix(compressed, len(serialized))
        if not connection.core.try_send_message(self.stream_id, prefix, serialized):
            return False
        self._sent = True
        connection.outbox.schedule()
        return True

    async def _send_waiting(self, serialized: bytes) -> None:
        """The plain path beside ``try_send_bytes``: in as many pieces, and with as many waits, as it takes."""
        if self._send_lock is None:
            self._send_lock = trio.Lock()
        timeout = self._connection.limits.send_timeout
        async with self._send_lock:
            if not self._headers_sent and self._open:
                self._send_headers()
            compressed = 0
            if self._gzip and self.compress:
                compressed, serialized = 1, await self._pack(serialized)
            with trio.move_on_after(timeout) as scope:
                await self._send_pieces(message_prefix(compressed, len(serialized)) + serialized)
            if scope.cancelled_caught:
                raise StatusError(StatusCode.RESOURCE_EXHAUSTED, f"client did not take a message within {timeout:g} s")
            self._sent = True

    async def _pack(self, serialized: bytes) -> bytes:
        if len(serialized) <= CHUNK:
            return gzip_compress(serialized)
        limiter = self._connection.packing_threads
        return await trio.to_thread.run_sync(gzip_compress, serialized, abandon_on_cancel=True, limiter=limiter)

    async def _send_pieces(self, framed: bytes) -> None:
        connection, outbox, core = self._connection, self._connection.outbox, self._connection.core
        position, length = 0, len(framed)
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._broken:
            raise trio.BrokenResourceError("a message before this one was cut")
        try:
            while position < length:
                if not self._open:
                    raise trio.BrokenResourceError("the call has ended")
                window = core.sendable(self.stream_id)
                if window <= 0:
                    await connection.wait_for_window(self.stream_id, self._sending)
                    continue
                piece = min(window, CHUNK, length - position)
                if outbox.crowded or not outbox.has_room:
                    if not await outbox.wait_for_room(self._sending, piece):
                        continue
                    window = core.sendable(self.stream_id) if self._open else 0
                    piece = min(window, piece)
                if piece > 0:
                    core.send_data(self.stream_id, framed[position : position + piece])
                    position += piece
                    outbox.schedule()
                outbox.admit()
        except BaseException:
            self._broken = position > 0
            raise

    def _send_headers(self, custom: bytes = b"") -> None:
        self._headers_sent = True
        block = _RESPONSE_GZIP_BLOCK if self._gzip else RESPONSE_BLOCK
        self._connection.core.send_headers(self.stream_id, block + custom)
