"""One call of the client: what purerpc's stubs send a request on and read the answers from.

purerpc's wrappers use ``expect_message_type``, ``send_message``, ``receive_message``, ``close`` and ``end_stream_event`` of
its own stream; this is their other implementation. What is different: a failure is an :class:`RpcError`, whatever failed,
and any exception that passes through here, Trio's Cancelled too, ends the call with RST_STREAM.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio
from google.protobuf.message import DecodeError, Message
from purerpc.grpclib.events import ResponseEnded as PurerpcResponseEnded
from purerpc.grpclib.status import Status, StatusCode

from .connection import STREAM_WINDOW, ErrorCodes, Metadata
from .errors import RpcError

if TYPE_CHECKING:
    from .channel import Channel

__all__ = ["Call"]


class Call:
    """A call in flight. Complete messages wait in ``_messages``, at most a stream window of them (1 MiB) and one more
    (``max_message_size``): the window is opened again only while none waits."""

    def __init__(self, channel: Channel, stream_id: int, service: str, method: str, max_message_size: int) -> None:
        self.stream_id = stream_id
        self.initial_metadata: Metadata = ()
        self.end_stream_event: Any = None
        """What purerpc's wrappers look at when ``receive_message`` returned None. Always OK: other statuses are raised."""
        self._channel = channel
        self._name = f"{service}.{method}"
        self._max_message_size = max_message_size
        self._message_type: type[Message] | None = None
        self._one_response = False
        self._responses = 0
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._unacknowledged = 0
        self._arrived = trio.Event()
        self._half_closed = False
        self._ended: RpcError | Status | None = None

    # purerpc's side.

    def expect_message_type(self, message_type: type[Message]) -> None:
        self._message_type = message_type
        try:
            method = message_type.DESCRIPTOR.file.pool.FindMethodByName(self._name)
        except (KeyError, AttributeError):
            return
        self._one_response = not getattr(method, "server_streaming", True)

    async def send_message(self, message: Message) -> None:
        """Send one message, waiting for the peer's windows. Returns early if the server has ended the call: why is for
        ``receive_message`` to say."""
        with self._reset_on_error():
            await trio.lowlevel.checkpoint_if_cancelled()
            body = message.SerializeToString()
            data = memoryview(struct.pack(">BI", 0, len(body)) + body)
            while data and self._ended is None:
                data = data[await self._channel.send_some(self, data) :]

    async def close(self) -> None:
        """Say that no more messages come from here."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._ended is None and not self._half_closed:
            self._half_closed = True
            self._channel.end_request(self)

    async def receive_message(self) -> Message | None:
        """The next message, None after the last one. Raises RpcError if the call failed."""
        with self._reset_on_error():
            await trio.lowlevel.checkpoint_if_cancelled()
            while not self._messages and self._ended is None:
                self._arrived = trio.Event()
                await self._arrived.wait()
            if self._messages:
                return self._next_message()
            if isinstance(self._ended, RpcError):
                raise self._ended
            if self._one_response and self._responses == 0:
                raise RpcError(StatusCode.INTERNAL, "the server answered OK and no message")
            self.end_stream_event = PurerpcResponseEnded(self.stream_id, self._ended)
            return None

    def _next_message(self) -> Message:
        body = self._messages.popleft()
        self._responses += 1
        if self._one_response and self._responses > 1:
            raise RpcError(StatusCode.INTERNAL, "the server answered more than one message")
        if not self._messages:
            self._acknowledge()
        assert self._message_type is not None, "expect_message_type comes first"
        try:
            return self._message_type.FromString(body)
        except DecodeError as error:
            raise RpcError(StatusCode.INTERNAL, f"the server's message cannot be decoded: {error}") from error

    def cancel(self) -> None:
        """End the call now, if it has not ended: the server is told, what waits is dropped."""
        if self._ended is None:
            self._messages.clear()
            self._partial.clear()
            self._end(RpcError(StatusCode.CANCELLED, "the call was cancelled here"))
            self._channel.forget(self, ErrorCodes.CANCEL)

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    # The channel's side.

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def data_received(self, data: bytes, flow_controlled_length: int) -> None:
        self._unacknowledged += flow_controlled_length
        self._partial += data
        while len(self._partial) >= 5:
            compressed, length = struct.unpack_from(">BI", self._partial)
            if compressed:
                return self._fail(StatusCode.INTERNAL, "the server sent a compressed message, which was not offered")
            if length > self._max_message_size:
                text = f"the server's message of {length} bytes is larger than {self._max_message_size}"
                return self._fail(StatusCode.RESOURCE_EXHAUSTED, text)
            if len(self._partial) < 5 + length:
                break
            self._messages.append(bytes(memoryview(self._partial)[5 : 5 + length]))
            del self._partial[: 5 + length]
        if self._messages:
            self._arrived.set()
        else:
            self._acknowledge()
        return None

    def response_ended(self, status: Status, metadata: Metadata) -> None:
        """The server's last word. A message cut off by an OK is a failure."""
        if status.status_code is not StatusCode.OK:
            self._end(RpcError(status.status_code, status.status_message, metadata))
        elif self._partial:
            self._end(RpcError(StatusCode.INTERNAL, "the server ended the call inside a message"))
        else:
            self._end(status)
        if not self._half_closed:
            self._channel.forget(self, ErrorCodes.NO_ERROR)

    def failed(self, error: RpcError) -> None:
        """The call ended without a word of the server's: what came before still counts."""
        self._end(error)

    def _fail(self, code: StatusCode, message: str) -> None:
        self._end(RpcError(code, message))
        self._channel.forget(self, ErrorCodes.CANCEL)

    def _end(self, outcome: RpcError | Status) -> None:
        if self._ended is None:
            self._ended = outcome
            self._arrived.set()

    def _acknowledge(self) -> None:
        # half a window at a time: a WINDOW_UPDATE for each small message would cost more than the message
        if self._unacknowledged >= STREAM_WINDOW // 2 and self._ended is None:
            self._channel.acknowledge(self, self._unacknowledged)
            self._unacknowledged = 0
