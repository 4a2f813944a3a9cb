"""What carries a connection's bytes: a plain socket, or any Trio stream (TLS, memory).

Rules that hold here:

* Whatever goes wrong with the carrier is trio.BrokenResourceError; nothing else of a socket's or of TLS's leaves this module.
* ``send_now`` never waits: it takes what the kernel takes at once. A Trio stream can promise nothing, so it takes nothing.
* ``aclose`` closes at once, also in a cancelled task, and may be called twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

__all__ = ["SocketTransport", "StreamTransport", "Transport", "describe_address"]

READ_SIZE: Final = 65_536
"""Bytes read at a time: one connection's share of a loop turn."""


def describe_address(sock: socket.socket, address: object) -> str:
    """``address`` of a connection's other end as gRPC names peers: ``ipv4:1.2.3.4:5``, ``ipv6:[::1]:5``, ``unix:/path``."""
    if sock.family == socket.AF_UNIX:
        name = sock.getsockname()  # the client's own name is empty nearly always
        return f"unix:{name if isinstance(name, str) else os.fsdecode(name)}"
    assert isinstance(address, tuple)
    if sock.family == socket.AF_INET6:
        return f"ipv6:[{address[0]}]:{address[1]}"
    return f"ipv4:{address[0]}:{address[1]}"


class Transport(Protocol):
    """One connection's carrier. ``peer`` is its client's address as gRPC writes it."""

    peer: str

    @property
    def sends_at_once(self) -> bool: ...

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None: ...

    async def handshake(self) -> None:
        """What comes before HTTP/2."""

    async def receive(self) -> bytes:
        """Some bytes, or b"" at the end."""

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """How many of ``data``'s bytes went out without waiting."""

    async def send_all(self, data: bytes) -> None: ...

    async def send_eof(self) -> None:
        """Say that no more will come, as far as the carrier can say so."""

    async def aclose(self) -> None:
        """Close at once, also in a cancelled task."""


class SocketTransport:
    """A connected, non-blocking stream socket, read and written without a layer between."""

    sends_at_once: Final = True
    peer_certificate: Final = None

    __slots__ = ("_closed", "_socket", "peer")

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self._closed = False
        self.peer = peer

    async def handshake(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> bytes:
        try:
            while True:
                await wait_readable(self._socket)
                try:
                    return self._socket.recv(READ_SIZE)
                except BlockingIOError:
                    continue
        except (OSError, trio.ClosedResourceError) as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    async def send_all(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                await wait_writable(self._socket)
                rest = rest[self.send_now(rest) :]
        except trio.ClosedResourceError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            notify_closing(self._socket)
            self._socket.close()


class StreamTransport:
    """Any Trio stream."""

    sends_at_once: Final = False

    __slots__ = ("_stream", "peer")

    def __init__(self, stream: trio.abc.Stream, peer: str) -> None:
        self._stream = stream
        self.peer = peer

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None:
        """What ssl.SSLSocket.getpeercert() says; None without TLS or without a certificate."""
        if isinstance(self._stream, trio.SSLStream):
            certificate: Mapping[str, Any] | None = self._stream.getpeercert()
            return certificate
        return None

    async def handshake(self) -> None:
        """TLS's handshake, which must choose HTTP/2 by ALPN; nothing for other streams."""
        if not isinstance(self._stream, trio.SSLStream):
            await trio.lowlevel.checkpoint()
        else:
            await self._stream.do_handshake()
            if self._stream.selected_alpn_protocol() != "h2":
                raise trio.BrokenResourceError("the client did not choose h2 by ALPN")

    async def receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(READ_SIZE))
        except trio.ClosedResourceError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        return 0

    async def send_all(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except trio.ClosedResourceError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    async def send_eof(self) -> None:
        if isinstance(self._stream, trio.SSLStream):
            # close_notify; the connection still has to be closed below.
            await self._stream.aclose()
        elif isinstance(self._stream, trio.abc.HalfCloseableStream):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_eof()
        else:
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):  # it does not wait, so a cancelled task may finish it
            await trio.aclose_forcefully(self._stream)
