"""From an address to a connected byte stream: TCP or a Unix socket, with TLS or without."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

import trio
from purerpc.grpclib.status import StatusCode

from trio_frontend.config import split_address

from .errors import RpcError

__all__ = ["Address", "open_transport", "tls_context"]


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: ``path`` of a Unix socket, or ``host`` and ``port``."""

    host: str
    port: int
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``. Raises ValueError."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            # gRPC's naming also has unix:///absolute/path
            path = path[2:] if path.startswith("///") else path
            if not path:
                raise ValueError(f"address {text!r}: a path is needed after unix:")
            return cls("localhost", 0, path)
        return cls(*split_address("address", text))

    @property
    def authority(self) -> str:
        if self.path is not None:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path is not None else self.authority


def tls_context(ca_certs: str | None = None, certfile: str | None = None, keyfile: str | None = None) -> ssl.SSLContext:
    """A client's TLS settings for gRPC. PEM files: ``ca_certs`` to check the server with (the system's authorities if None),
    ``certfile`` and ``keyfile`` of a client certificate. Raises OSError (ssl.SSLError among them) for unusable files."""
    context = ssl.create_default_context(cafile=ca_certs)
    context.set_alpn_protocols(["h2"])
    if certfile is not None:
        context.load_cert_chain(certfile, keyfile)
    return context


async def open_transport(address: Address, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect. Raises RpcError(UNAVAILABLE) if there is no server there or no TLS to agree on."""
    stream: trio.abc.Stream
    try:
        if address.path is not None:
            stream = await trio.open_unix_socket(address.path)
        else:
            stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        raise RpcError(StatusCode.UNAVAILABLE, f"cannot connect to {address}: {_reason(error)}") from error
    if ssl_context is None:
        return stream
    secured = trio.SSLStream(stream, ssl_context, server_hostname=address.host, https_compatible=True)
    try:
        await secured.do_handshake()
    except (trio.BrokenResourceError, ssl.SSLError, ssl.CertificateError) as error:
        await trio.aclose_forcefully(secured)
        raise RpcError(StatusCode.UNAVAILABLE, f"no TLS with {address}: {error.__cause__ or error}") from error
    except BaseException:
        await trio.aclose_forcefully(secured)
        raise
    if secured.selected_alpn_protocol() != "h2":
        await trio.aclose_forcefully(secured)
        raise RpcError(StatusCode.UNAVAILABLE, f"{address} does not speak HTTP/2 over TLS (no ALPN h2)")
    return secured


def _reason(error: OSError) -> str:
    # Trio tries each of a name's addresses and hangs their errors on the one that it raises
    cause: BaseException | None = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    number = cause.errno if isinstance(cause, OSError) and cause.errno else error.errno
    return os.strerror(number) if number is not None and number > 0 else str(error)
