"""Listeners: where connections come from. TCP over IPv4 and IPv6, Unix sockets, an inherited file descriptor; each with or without TLS.

Rules that hold here:

* Nothing listens on every interface unless asked to: the default host is 127.0.0.1.
* A listener owns its socket from the moment it is made, and the server that serves it closes it.
* TLS means HTTP/2 chosen by ALPN (RFC 9113 section 3.2); a client that does not choose it is closed after the handshake.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from typing import Any, Final

import trio

__all__ = ["Listener", "listen_fd", "listen_tcp", "listen_unix", "tls_context"]

_BACKLOG: Final = 1024
"""Connections that wait in the kernel; Linux cuts it to net.core.somaxconn."""


class Listener:
    """A bound, listening stream socket, and the TLS context for its connections or None.

    ``address`` is ``(host, port)`` for TCP, with the port that was given out if 0 was asked for, and the path for a Unix socket.
    """

    __slots__ = ("_identity", "address", "socket", "tls")

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self.socket = sock
        self.tls = tls
        self._identity: tuple[int, int] | None = None
        name = sock.getsockname()
        self.address: tuple[str, int] | str
        if sock.family == socket.AF_UNIX:
            self.address = name if isinstance(name, str) else os.fsdecode(name)
        else:
            self.address = name[0], name[1]
        if tls is not None:
            tls.set_alpn_protocols(["h2"])

    def unlink_on_close(self, path: str) -> None:
        """Remove the socket file at ``path`` when the listener closes, unless another has taken its place."""
        found = os.stat(path)
        self._identity = found.st_dev, found.st_ino

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self.socket.close()
        if self._identity is not None and isinstance(self.address, str):
            with suppress(FileNotFoundError):
                found = os.stat(self.address)
                if (found.st_dev, found.st_ino) == self._identity:
                    os.unlink(self.address)
            self._identity = None

    def __repr__(self) -> str:
        return f"<Listener {self.address}{' tls' if self.tls else ''}>"


async def listen_tcp(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    tls: ssl.SSLContext | None = None,
    reuse_port: bool = False,
) -> list[Listener]:
    """Listen on ``host``, an address or a name, one listener for each address it stands for; port 0: the system's choice.

    IPv6 listeners take no IPv4 connections, so that ``0.0.0.0`` and ``::`` can be listened on side by side. ``reuse_port`` sets
    SO_REUSEPORT: several processes share the port, and the kernel spreads connections over them.

    Raises OSError naming the address that could not be had.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise socket.gaierror(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from None
    listeners: list[Listener] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if listeners and port == 0:  # one port for all addresses of a name
                address = (address[0], listeners[0].address[1], *address[2:])
            listeners.append(_listen_on(family, address, tls, reuse_port))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_on(family: int, address: tuple[Any, ...], tls: ssl.SSLContext | None, reuse_port: bool) -> Listener:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError as exc:
            name = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            raise OSError(exc.errno, f"cannot listen on {name}:{address[1]}: {exc.strerror}") from None
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, tls)


def listen_unix(path: str | os.PathLike[str], *, tls: ssl.SSLContext | None = None, mode: int | None = None) -> Listener:
    """Listen on a Unix socket at ``path``, with file permissions ``mode`` (None: what the umask leaves).

    A socket file that nobody listens on any more is replaced; one that is in use, or a file of another kind, raises OSError
    naming it. The file is removed when the listener closes.
    """
    name = os.fspath(path)
    _remove_stale(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.bind(name)
        except OSError as exc:
            raise OSError(exc.errno, f"cannot listen on {name}: {exc.strerror}") from None
        if mode is not None:
            os.chmod(name, mode)
        sock.listen(_BACKLOG)
        listener = Listener(sock, tls)
        listener.unlink_on_close(name)
    except BaseException:
        sock.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, f"cannot listen on {path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:  # its backlog is full: in use, more than enough
            pass
    raise OSError(errno.EADDRINUSE, f"cannot listen on {path}: another server does")


def listen_fd(fd: int, *, tls: ssl.SSLContext | None = None) -> Listener:
    """Serve a socket that was inherited, bound and listening, as file descriptor ``fd`` (systemd hands out 3 and up).

    Raises ValueError if ``fd`` is no listening stream socket, OSError if it is no open descriptor. The server closes it.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise OSError(exc.errno, f"cannot serve file descriptor {fd}: {exc.strerror}") from None
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise ValueError(f"file descriptor {fd} is no listening stream socket")
    sock.setblocking(False)
    return Listener(sock, tls)


def tls_context(
    certificate_chain: str | os.PathLike[str],
    private_key: str | os.PathLike[str],
    *,
    client_ca: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """A server's TLS context: TLS 1.2 or later, HTTP/2 by ALPN. With ``client_ca`` clients must present a certificate that it
    signed (mTLS). Paths are of PEM files. Any other context of yours does too: ALPN is set when it is listened with.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # RFC 9113 section 9.2: no compression, no renegotiation, and over TLS 1.2 only ephemeral AEAD suites.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    context.load_cert_chain(certificate_chain, private_key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context
