"""A connection to a gRPC server, and the scope that it lives in.

Rules that hold here:

* Two tasks belong to a channel, its reader and its writer. They end with ``connect``'s scope, and never raise: what goes
  wrong with the connection is every call's RpcError.
* A call belongs to the task that makes it. Its deadline is that of the task's cancel scopes: it travels as grpc-timeout, and
  the scope, not the server, is the judge. Cancel the task, or leave :meth:`Channel.stream`, and the server gets RST_STREAM.
* One connection, no reconnecting: after a GOAWAY or a loss new calls are UNAVAILABLE, and a new ``connect`` is in order.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, cast

import trio
from google.protobuf.message import Message
from purerpc.grpclib.status import StatusCode

from trio_frontend.nurseries import open_private_nursery

from .call import Call
from .connection import (
    Connection,
    ConnectionBrokenError,
    DataReceived,
    ErrorCodes,
    Event,
    GoAwayReceived,
    ResponseEnded,
    ResponseStarted,
    StreamReset,
    check_metadata,
)
from .errors import RpcError
from .transport import Address, open_transport

__all__ = ["Channel", "Responses", "connect", "open_channel"]

logger = logging.getLogger(__name__)

MAX_UNSENT = 1 << 20
"""Bytes of output that wait for the socket before senders wait too."""
RECEIVE_SIZE = 65_536
DEFAULT_MAX_MESSAGE_SIZE = 32 * 1024 * 1024

Response = TypeVar("Response", bound=Message)


@asynccontextmanager
async def connect(
    address: str,
    *,
    ssl_context: ssl.SSLContext | None = None,
    metadata: Iterable[tuple[str, str | bytes]] = (),
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
) -> AsyncIterator[Channel]:
    """A channel to ``address`` (``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``) for purerpc's stubs.

    ``metadata`` goes with every call (``[("authorization", "Bearer KEY")]``). ``ssl_context`` makes it TLS, see :func:`tls_context`.
    ``max_message_size`` is the largest answer taken, in bytes. Leaving the scope ends the calls that are left and closes
    the connection. Raises RpcError(UNAVAILABLE) if there is no server, ValueError for a bad address or metadata::

        async with connect("127.0.0.1:50051") as channel:
            stub = InferenceStub(channel)
            with trio.fail_after(10):
                answer = await stub.Generate(request)
            async with channel.stream(stub.GenerateStream, request) as responses:
                async for response in responses:
                    ...
    """
    target = Address.parse(address)
    checked = check_metadata(metadata)
    transport = await open_transport(target, ssl_context)
    scheme = "http" if ssl_context is None else "https"
    async with open_channel(transport, target.authority, scheme, checked, max_message_size) as channel:
        yield channel


@asynccontextmanager
async def open_channel(
    transport: trio.abc.Stream,
    authority: str,
    scheme: str = "http",
    metadata: Iterable[tuple[str, str | bytes]] = (),
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
) -> AsyncIterator[Channel]:
    """Like :func:`connect`, over a stream that is connected already and is closed at the end: in memory, say, or a proxy's."""
    async with transport, open_private_nursery() as nursery:
        channel = Channel(transport, scheme, authority, check_metadata(metadata), max_message_size)
        nursery.start_soon(channel.read)
        nursery.start_soon(channel.write)
        try:
            yield channel
        finally:
            channel.close()
            nursery.cancel_scope.cancel()


class Responses(Generic[Response]):
    """The answers of a streaming call: an async iterator. ``initial_metadata`` is there once the first one is."""

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def initial_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(self._call.initial_metadata)

    def __aiter__(self) -> Responses[Response]:
        return self

    async def __anext__(self) -> Response:
        message = await self._call.receive_message()
        if message is None:
            raise StopAsyncIteration
        return cast(Response, message)


class Channel:
    """See :func:`connect`, which makes it. purerpc's stubs take it for a channel of purerpc's own."""

    def __init__(
        self,
        transport: trio.abc.Stream,
        scheme: str,
        authority: str,
        metadata: list[tuple[str, str | bytes]],
        max_message_size: int,
    ) -> None:
        self._transport = transport
        self._scheme = scheme
        self._authority = authority
        self._metadata = metadata
        self._max_message_size = max_message_size
        self._connection = Connection("trio-frontend")
        self._calls: dict[int, Call] = {}
        self._refusal: RpcError | None = None
        self._to_write = trio.Event()
        self._changed = trio.Event()
        # purerpc.Client reads these three
        self._grpc_socket = self
        self._host, _, self._port = authority.rpartition(":")

    @asynccontextmanager
    async def stream(
        self,
        method: Any,
        request: Message,
        *,
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> AsyncIterator[Responses[Any]]:
        """Call a stub's method that answers with a stream. Leaving the scope before its end cancels the call."""
        # A purerpc stub's method called as it is would be an async generator, which cancels nothing when it is dropped.
        call: Call = await method._stream_fn(metadata=metadata)
        try:
            await call.send_message(request)
            await call.close()
            yield Responses(call)
        finally:
            call.cancel()

    # purerpc.Client's side.

    async def start_request(
        self,
        scheme: str,
        service: str,
        method: str,
        message_type: str | None = None,
        authority: str | None = None,
        *,
        custom_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> Call:
        """Begin a call, with the deadline of the cancel scopes around. Waits while the server has as many as it takes."""
        metadata = [*self._metadata, *check_metadata(custom_metadata)]
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._refusal is None and not self._connection.can_open_stream():
            await self._changed.wait()
        if self._refusal is not None:
            raise RpcError(self._refusal.code, self._refusal.message)
        timeout = trio.current_effective_deadline() - trio.current_time()
        stream_id = self._connection.open_stream(self._scheme, self._authority, service, method, timeout, metadata)
        call = Call(self, stream_id, service, method, self._max_message_size)
        self._calls[stream_id] = call
        self._to_write.set()
        return call

    # A call's side.

    async def send_some(self, call: Call, data: memoryview) -> int:
        """Send what the windows let through, waiting until that is something; 0 if the call ended meanwhile."""
        while not call.ended:
            room = self._connection.sendable(call.stream_id)
            if room > 0 and len(self._connection.out) < MAX_UNSENT:
                self._connection.send(call.stream_id, data[:room])
                self._to_write.set()
                return min(room, len(data))
            await self._changed.wait()
        return 0

    def end_request(self, call: Call) -> None:
        self._connection.send(call.stream_id, b"", end_stream=True)
        self._to_write.set()

    def acknowledge(self, call: Call, length: int) -> None:
        self._connection.acknowledge(call.stream_id, length)
        self._to_write.set()

    def forget(self, call: Call, error_code: ErrorCodes) -> None:
        """The call has ended here: whatever still comes for it is dropped."""
        if self._calls.pop(call.stream_id, None) is not None:
            self._connection.reset(call.stream_id, error_code)
            self._to_write.set()
            self._broadcast()

    # connect()'s side.

    async def read(self) -> None:
        """Until the connection ends, however it does."""
        try:
            while data := await self._transport.receive_some(RECEIVE_SIZE):
                for event in self._connection.receive(bytes(data)):
                    self._handle(event)
                self._to_write.set()
                self._broadcast()
            self._lose("the server closed the connection")
        except ConnectionBrokenError as error:
            self._to_write.set()
            self._lose(f"the server broke the protocol: {error}")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lose(f"the connection was lost: {error.__cause__ or error}")

    async def write(self) -> None:
        """Send output as it comes. A task of its own: a sender cancelled inside a frame would break it for all."""
        out = self._connection.out
        try:
            while True:
                if not out:
                    self._to_write = trio.Event()
                    await self._to_write.wait()
                    continue
                data = bytes(out)
                out.clear()
                await self._transport.send_all(data)
                self._broadcast()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lose(f"the connection was lost: {error.__cause__ or error}")

    def close(self) -> None:
        self._lose("the channel is closed")

    def _broadcast(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _lose(self, why: str) -> None:
        self._refuse(RpcError(StatusCode.UNAVAILABLE, why))
        for call in self._calls.values():
            call.failed(RpcError(StatusCode.UNAVAILABLE, why))
        self._calls.clear()
        self._broadcast()

    def _refuse(self, error: RpcError) -> None:
        if self._refusal is None:
            self._refusal = error

    def _handle(self, event: Event) -> None:
        if isinstance(event, GoAwayReceived):
            self._go_away(event)
            return
        call = self._calls.get(event.stream_id)
        if call is None:
            return
        if isinstance(event, DataReceived):
            call.data_received(event.data, event.flow_controlled_length)
        elif isinstance(event, ResponseStarted):
            call.initial_metadata = event.metadata
        elif isinstance(event, ResponseEnded):
            call.response_ended(event.status, event.metadata)
            self._calls.pop(event.stream_id, None)
        elif isinstance(event, StreamReset):
            call.failed(RpcError(*_reset_status(event.error_code)))
            del self._calls[event.stream_id]

    def _go_away(self, event: GoAwayReceived) -> None:
        reason = f" ({event.debug.decode('utf-8', 'replace')})" if event.debug else ""
        why = f"the server is going away{reason}"
        self._refuse(RpcError(StatusCode.UNAVAILABLE, why))
        logger.debug("going away, error code %d, last stream %d", event.error_code, event.last_stream_id)
        for stream_id in [s for s in self._calls if s > event.last_stream_id]:
            self._calls.pop(stream_id).failed(RpcError(StatusCode.UNAVAILABLE, why))


def _reset_status(error_code: int) -> tuple[StatusCode, str]:
    """What a RST_STREAM of the server's means (gRPC over HTTP/2, "Errors")."""
    code = {
        ErrorCodes.REFUSED_STREAM: StatusCode.UNAVAILABLE,
        ErrorCodes.CANCEL: StatusCode.CANCELLED,
        ErrorCodes.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
        ErrorCodes.INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
    }.get(cast(ErrorCodes, error_code), StatusCode.INTERNAL)
    try:
        name = ErrorCodes(error_code).name
    except ValueError:
        name = str(error_code)
    return code, f"the server reset the stream: {name}"
