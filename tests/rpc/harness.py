"""What the tests of rpc/ share: a service whose methods are the test's functions, a server in a nursery, and a client that speaks frames.

Every server checks, when its test ends, that no connection, call or task is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import hpack
import purerpc
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue
from purerpc import Cardinality, RPCSignature

from tests.rpc.http2 import wire
from tests.rpc.http2.wire import END_HEADERS, END_STREAM, Fields, Frame
from trio_frontend import rpc

UNARY = Cardinality.UNARY_UNARY
SERVER_STREAM = Cardinality.UNARY_STREAM
CLIENT_STREAM = Cardinality.STREAM_UNARY
BIDI = Cardinality.STREAM_STREAM


def service(handler: Callable[..., Any], cardinality: Cardinality = UNARY, *, name: str = "test.Test") -> purerpc.Service:
    """A service with one method, ``Call``, whose messages are BytesValue."""
    made = purerpc.Service(name)
    made.add_method("Call", handler, RPCSignature(cardinality, BytesValue, BytesValue))
    return made


def value(content: bytes = b"") -> BytesValue:
    return BytesValue(value=content)


def framed(content: bytes = b"") -> bytes:
    """A length-prefixed BytesValue."""
    serialized = value(content).SerializeToString()
    return b"\0" + len(serialized).to_bytes(4, "big") + serialized


def request_fields(
    path: bytes = b"/test.Test/Call", extra: Iterable[tuple[bytes, bytes]] = (), without: Iterable[bytes] = ()
) -> Fields:
    fields = [(b":path", path) if name == b":path" else (name, content) for name, content in wire.REQUEST]
    return [item for item in fields if item[0] not in set(without)] + list(extra)


@dataclass
class Response:
    """What came on one stream: header lists in order, the bytes of DATA, and how it ended."""

    headers: list[dict[str, str]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def closed(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def messages(self) -> list[bytes]:
        """The values of the whole messages; what is left over is not looked at."""
        out, position = [], 0
        while len(self.data) - position >= 5:
            stop = position + 5 + int.from_bytes(self.data[position + 1 : position + 5], "big")
            if stop > len(self.data):
                break
            assert self.data[position] == 0
            out.append(BytesValue.FromString(bytes(self.data[position + 5 : stop])).value)
            position = stop
        return out

    @property
    def trailers(self) -> dict[str, str]:
        assert self.ended, f"no trailers yet: {self}"
        return self.headers[-1]

    @property
    def status(self) -> int:
        return int(self.trailers["grpc-status"])

    @property
    def message(self) -> str:
        return self.trailers.get("grpc-message", "")


class Client:
    """A client that sends what the test says, frame by frame, and sorts what comes by stream.

    It answers SETTINGS and PING like any client, unless told not to, and never sends WINDOW_UPDATE by itself.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.answers = True
        self.responses: dict[int, Response] = {}
        self.goaways: list[tuple[int, int, bytes]] = []
        self.pings = 0
        self.closed = False
        self.next_id = 1
        self._sending = trio.Lock()
        self._buffer = bytearray()
        self._decoder = hpack.Decoder()

    async def start(self, **settings: int) -> None:
        """Preface and SETTINGS; by name, as ``INITIAL_WINDOW_SIZE=0``."""
        pairs = [(getattr(wire, name), content) for name, content in settings.items()]
        await self.stream.send_all(wire.PREFACE + wire.settings(pairs))

    async def send(self, *frames: bytes) -> None:
        async with self._sending:
            await self.stream.send_all(b"".join(frames))

    def request(
        self,
        *contents: bytes,
        path: bytes = b"/test.Test/Call",
        extra: Iterable[tuple[bytes, bytes]] = (),
        end: bool = True,
    ) -> tuple[int, bytes]:
        """The frames of a request with these messages, and its stream."""
        stream_id, self.next_id = self.next_id, self.next_id + 2
        self.responses[stream_id] = Response()
        fields = request_fields(path, extra)
        flags = END_HEADERS | (END_STREAM if end and not contents else 0)
        frames = wire.headers(stream_id, fields, flags)
        for i, content in enumerate(contents):
            frames += wire.data(stream_id, framed(content), END_STREAM if end and i == len(contents) - 1 else 0)
        return stream_id, frames

    async def open(self, *contents: bytes, **how: Any) -> int:
        """Send a request; see :meth:`request`."""
        stream_id, frames = self.request(*contents, **how)
        await self.send(frames)
        return stream_id

    async def call(self, *contents: bytes, **how: Any) -> Response:
        """Send a request and wait for its whole response."""
        return await self.response(await self.open(*contents, **how))

    async def response(self, stream_id: int) -> Response:
        response = self.responses[stream_id]
        await self.until(lambda: response.closed)
        return response

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until ``condition`` holds; fails if the connection ends before."""
        while not condition():
            assert await self.read(), f"the connection ended: {self.goaways}"

    async def read(self) -> bool:
        """Read once and act on what came. False at the end."""
        if self.closed:
            return False
        try:
            received = await self.stream.receive_some(65_536)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            received = b""
        if not received:
            self.closed = True
            return False
        self._buffer += received
        while len(self._buffer) >= 9:
            stop = 9 + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < stop:
                break
            [frame] = wire.read_frames(bytes(self._buffer[:stop]))
            del self._buffer[:stop]
            await self._act_on(frame)
        return True

    async def read_to_the_end(self) -> None:
        while await self.read():
            pass

    async def leave(self) -> None:
        """Close when the server does."""
        await self.read_to_the_end()
        await self.aclose()

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self.stream)

    async def _act_on(self, frame: Frame) -> None:
        response = self.responses.get(frame.stream_id)
        if frame.kind == wire.SETTINGS and not frame.flags & wire.ACK:
            await self._answer(wire.frame(wire.SETTINGS, wire.ACK))
        elif frame.kind == wire.PING and not frame.flags & wire.ACK:
            self.pings += 1
            await self._answer(wire.ping(frame.payload, wire.ACK))
        elif frame.kind == wire.GOAWAY:
            words = [int.from_bytes(frame.payload[i : i + 4], "big") for i in (0, 4)]
            self.goaways.append((words[0], words[1], frame.payload[8:]))
        elif frame.kind == wire.HEADERS:
            assert response is not None
            assert not response.closed
            fields = [(name.decode(), content.decode()) for name, content in self._decoder.decode(frame.payload, raw=True)]
            response.headers.append(dict(fields))
            response.ended = bool(frame.flags & END_STREAM)
        elif frame.kind == wire.DATA:
            assert response is not None
            assert not response.closed
            response.data += frame.payload
            response.ended = bool(frame.flags & END_STREAM)
        elif frame.kind == wire.RST_STREAM and response is not None:
            code = int.from_bytes(frame.payload, "big")
            if not response.ended:  # after the end it only asks to stop sending
                response.reset = code

    async def _answer(self, frame: bytes) -> None:
        if self.answers:
            # If this breaks the server has gone, and reading finds out.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.send(frame)


class Serving:
    """A server in a nursery, and clients in memory."""

    def __init__(self, server: rpc.Server, nursery: trio.Nursery) -> None:
        self.server = server
        self.nursery = nursery
        self.clients: list[Client] = []

    async def connect(self, **settings: int) -> Client:
        """A client over a memory stream that has said its preface."""
        client = self.connect_silently()
        await client.start(**settings)
        return client

    def connect_silently(self) -> Client:
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self.server.serve_stream, theirs)
        self.clients.append(Client(ours))
        return self.clients[-1]

    async def shutdown(self) -> None:
        """Shut down at once, with clients that close when the server does."""
        async with trio.open_nursery() as nursery:
            for client in self.clients:
                nursery.start_soon(client.leave)
            await self.server.shutdown(0)


@asynccontextmanager
async def serving(
    *services: purerpc.Service, limits: rpc.ServerLimits | None = None, interceptors: Iterable[Any] = ()
) -> AsyncIterator[Serving]:
    """A running server; at the end it is shut down, and nothing may be left of it."""
    server = rpc.Server(services, limits=limits, interceptors=tuple(interceptors))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        serve = Serving(server, nursery)
        yield serve
        await serve.shutdown()
    assert server.live_connections == 0
    assert server.live_calls == 0
    assert server.running_handlers == 0


class Recorder:
    """A handler that waits until it is told to go on, and records how each of its runs ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.started = 0
        self.release = trio.Event()

    async def __call__(self, message: Any, request: rpc.Call) -> BytesValue:
        self.started += 1
        try:
            await self.release.wait()
        except BaseException as exc:
            self.ends.append(type(exc).__name__)
            raise
        self.ends.append("returned")
        return value(b"done")

    async def until_started(self, count: int = 1) -> None:
        while self.started < count:
            await trio.lowlevel.checkpoint()

    async def until_ended(self, count: int = 1) -> None:
        while len(self.ends) < count:
            await trio.lowlevel.checkpoint()


class Statuses:
    """An interceptor that records the status of every call."""

    def __init__(self) -> None:
        self.seen: list[rpc.Status] = []

    @asynccontextmanager
    async def __call__(self, call: rpc.Call) -> AsyncIterator[None]:
        try:
            yield
        finally:
            assert call.status is not None
            self.seen.append(call.status)

    @property
    def names(self) -> list[str]:
        return [status.status_code.name for status in self.seen]
