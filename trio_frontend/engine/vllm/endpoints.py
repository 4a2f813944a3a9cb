"""Addresses: where the sockets of a life are bound, and what an engine is told of them."""

from __future__ import annotations

import ipaddress
import pathlib
import socket
from typing import Final, Protocol

from trio_frontend.engine.vllm.sockets import Addresses

__all__ = ["Endpoints", "IpcEndpoints", "TcpEndpoints", "bound_to_this_host", "is_this_host", "parse_tcp"]

WILDCARDS: Final = ("*", "0.0.0.0", "::", "[::]")


class Endpoints(Protocol):
    def bind(self, rank: int, epoch: int) -> Addresses:
        """What the sockets of a new life bind to."""

    def told(self, bound: Addresses, peer: str | None) -> Addresses:
        """What an engine at ``peer`` (an IP address) is told of a life that is bound to ``bound``."""


class IpcEndpoints:
    """Unix sockets in ``directory``, which only this user may enter: for engines on this machine that we started."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def bind(self, rank: int, epoch: int) -> Addresses:
        return Addresses(*(f"ipc://{self._directory}/{rank}.{epoch}.{end}" for end in ("in", "out")))

    def told(self, bound: Addresses, peer: str | None) -> Addresses:
        return bound


class TcpEndpoints:
    """Ports that the system chooses on ``host``. Engines are told ``advertise_host``, or else the host that they reached us by."""

    def __init__(self, host: str, advertise_host: str | None) -> None:
        self._host = host
        self._advertise_host = advertise_host

    def bind(self, rank: int, epoch: int) -> Addresses:
        return Addresses(f"tcp://{_bracketed(self._host)}:*", f"tcp://{_bracketed(self._host)}:*")

    def told(self, bound: Addresses, peer: str | None) -> Addresses:
        host = self._advertise_host
        if host is None:
            host = _own_address_towards(peer) if self._host in WILDCARDS else self._host
        return Addresses(_with_host(bound.input, host), _with_host(bound.output, host))


def parse_tcp(address: str) -> tuple[str, str]:
    """Host and port of ``tcp://HOST:PORT``. ValueError naming the address if it is not of this form."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if (
        not address.startswith("tcp://")
        or not colon
        or not host
        or not (port == "*" or (port.isdecimal() and int(port) < 65536))
    ):
        raise ValueError(f"{address!r} is no handshake address, it must be tcp://HOST:PORT or ipc://PATH")
    return host.strip("[]"), port


def bound_to_this_host(address: str) -> bool:
    """Whether only this host's own processes can reach what is bound to ``address``."""
    if not address.startswith("tcp://"):
        return True
    host = parse_tcp(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_this_host(peer: str) -> bool:
    """Whether ``peer`` (an IP address) is one of this host's own: what goes there comes from there."""
    try:
        return _plain_ip(_own_address_towards(peer)) == _plain_ip(peer)
    except OSError:
        return False


def _plain_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address)
    return parsed.ipv4_mapped or parsed if isinstance(parsed, ipaddress.IPv6Address) else parsed


def _with_host(address: str, host: str) -> str:
    return f"tcp://{_bracketed(host)}:{address.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _own_address_towards(peer: str | None) -> str:
    """The address of ours that packets to ``peer`` leave from. Nothing is sent."""
    target = _plain_ip(peer or "127.0.0.1")
    with socket.socket(socket.AF_INET if target.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect((str(target), 9))
        return str(probe.getsockname()[0])
