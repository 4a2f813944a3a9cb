"""gRPC over HTTP/2 for Trio: serves purerpc services from a nursery, and stands alone.

``addresses = await nursery.start(rpc.serve, services)`` is the short way; :class:`Server` is the long one. Handlers get a
:class:`Call` as purerpc's second parameter, ``request``.
"""

from __future__ import annotations

from trio_frontend.rpc.call import Call
from trio_frontend.rpc.http2 import Limits as Http2Limits
from trio_frontend.rpc.http2 import Rate
from trio_frontend.rpc.interceptors import Interceptor
from trio_frontend.rpc.limits import ServerLimits
from trio_frontend.rpc.listeners import Listener, listen_fd, listen_tcp, listen_unix, tls_context
from trio_frontend.rpc.metadata import Metadata
from trio_frontend.rpc.server import Address, Server, serve
from trio_frontend.rpc.status import RpcFailedError, Status, StatusCode, StatusError

__all__ = [
    "Address",
    "Call",
    "Http2Limits",
    "Interceptor",
    "Listener",
    "Metadata",
    "Rate",
    "RpcFailedError",
    "Server",
    "ServerLimits",
    "Status",
    "StatusCode",
    "StatusError",
    "listen_fd",
    "listen_tcp",
    "listen_unix",
    "serve",
    "tls_context",
]
