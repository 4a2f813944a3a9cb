"""Where a server listens, and which services are behind each door.

One door has everything. With ``control_address`` ``vllm.Control`` moves to a door of its own, so that whoever may generate cannot
pause the server; health and reflection are behind both. API keys and TLS are the same for both.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import purerpc

from trio_frontend import rpc
from trio_frontend.config import ServerConfig
from trio_frontend.services.auth import require_api_key
from trio_frontend.services.reflection import reflection_services

__all__ = ["Door", "Listeners", "make_doors", "open_listeners"]


@dataclass(slots=True)
class Listeners:
    """Bound and listening sockets of a server's doors. ``control`` is None if there is no such door."""

    main: list[rpc.Listener]
    control: list[rpc.Listener] | None = None

    def close(self) -> None:
        """Close them all. Safe to call twice, and after a server has closed them."""
        for listener in [*self.main, *(self.control or ())]:
            listener.close()


async def open_listeners(
    config: ServerConfig, tls: ssl.SSLContext | None, given: Iterable[rpc.Listener] | None = None
) -> Listeners:
    """Bind what ``config`` says; ``given`` listeners take the place of the main door's. Raises OSError naming the address."""
    if given is not None:
        main = list(given)
    elif config.unix_socket is not None:
        main = [rpc.listen_unix(config.unix_socket, tls=tls)]
    else:
        main = await rpc.listen_tcp(config.port, config.host, tls=tls)
    if config.control_address is None:
        return Listeners(main)
    try:
        host, port = config.control_address
        return Listeners(main, await rpc.listen_tcp(port, host, tls=tls))
    except BaseException:
        Listeners(main).close()
        raise


Door = tuple[rpc.Server, list[rpc.Listener]]
"""An rpc server, and what it listens on."""


def make_doors(
    config: ServerConfig,
    listeners: Listeners,
    *,
    inference: Sequence[purerpc.Service],
    control: purerpc.Service,
    health: purerpc.Service,
) -> list[Door]:
    """The doors of a server, the main one first."""
    interceptors = [require_api_key(config.api_keys)] if config.api_keys else []

    def door(services: Sequence[purerpc.Service]) -> rpc.Server:
        reflection = reflection_services(service.name for service in services)
        return rpc.Server([*services, *reflection], limits=config.limits, interceptors=interceptors)

    if listeners.control is None:
        return [(door([*inference, control, health]), listeners.main)]
    return [(door([*inference, health]), listeners.main), (door([control, health]), listeners.control)]
