"""Every knob of a server, its unit and its default.

Rules that hold here:

* A :class:`ServerConfig` is checked when it is made: what exists can be served. An error names the field and the value.
* Nothing here reads files, the environment or the command line; ``cli/`` does.
* Times are seconds, sizes are bytes or tokens, as each field says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trio_frontend.rpc.limits import ServerLimits

__all__ = ["DEFAULT_PORT", "ConfigError", "LoraModule", "OnEngineDeath", "ServerConfig", "TlsConfig", "split_address"]

DEFAULT_PORT = 50051
"""gRPC's customary port, and the default of vLLM's ``--grpc-port``."""

MAX_MESSAGE_SIZE = 32 * 1024 * 1024
"""Bytes of one incoming message, unpacked: 32 MiB, as vLLM's own frontend has it."""

OnEngineDeath = Literal["exit", "stay"]


class ConfigError(ValueError):
    """A setting that cannot be served. ``field`` is its name in the class, ``value`` what it was."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field}={value!r}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS of a listener, by the names of vLLM's ``--ssl-*`` flags.

    ``certfile`` and ``keyfile`` are PEM files; ``ca_certs`` a PEM file of the authorities that client certificates are held
    against. ``cert_reqs`` is ``ssl.CERT_NONE`` (0), ``CERT_OPTIONAL`` (1) or ``CERT_REQUIRED`` (2, mutual TLS).
    ``ciphers`` is an OpenSSL cipher list for TLS 1.2; TLS 1.3 has its own.
    """

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None

    def __post_init__(self) -> None:
        if self.cert_reqs not in (0, 1, 2):
            raise ConfigError("ssl_cert_reqs", self.cert_reqs, "0 (none), 1 (optional) or 2 (required)")
        if self.cert_reqs and not self.ca_certs:
            raise ConfigError("ssl_cert_reqs", self.cert_reqs, "client certificates need ssl_ca_certs to be held against")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """A LoRA adapter to load before the server serves: the name that requests use, and the engine's path to it."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server is told. Every field has a default that serves one model on this machine, without TLS."""

    # Where it listens.
    host: str = "127.0.0.1"
    """Address or name to bind. ``0.0.0.0`` or ``::`` is every interface, which is for the operator to decide."""
    port: int = DEFAULT_PORT
    """TCP port; 0 lets the system choose, and ``Server.addresses`` says which one it was."""
    unix_socket: str | None = None
    """Path of a Unix socket to serve on instead of TCP. The file is removed at the end."""
    control_address: tuple[str, int] | None = None
    """Host and port of a listener of its own for ``vllm.Control``; None: it is served with the rest."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of these is accepted as ``authorization: Bearer KEY`` on everything but health; empty: all callers are."""
    tls: TlsConfig | None = None

    # What it serves.
    model: str | None = None
    """Where tokenizer, vocabulary and sampling defaults are read: a directory or a Hugging Face id. None: the package's model."""
    tokenizer: str | None = None
    """Where tokenizer.json is, if not with the model."""
    hf_config_path: str | None = None
    """Where config.json and generation_config.json are, if not with the model."""
    generation_defaults: Mapping[str, Any] | None = field(default=None, hash=False)
    """Sampling defaults in place of the model's generation_config.json, by its names; an empty mapping: neutral ones."""
    served_model_names: tuple[str, ...] = ()
    """Names that a request's ``model`` may have; the first is the one reported. Empty: the name of the model itself."""
    lora_modules: tuple[LoraModule, ...] = ()
    """LoRA adapters to load before health says SERVING."""
    lora_path_prefixes: tuple[str, ...] = ()
    """Directories from which callers of ``vllm.Control`` may load adapters; empty: from no local path."""
    max_logprobs: int = 20
    """The most candidates per position a request may ask for (vLLM's ``--max-logprobs``); -1: up to the vocabulary."""
    structured_outputs_backend: str = "xgrammar"
    """What the engine compiles structured output with. The ready message does not name it, so it is told here too."""
    stream_interval: int = 1
    """Tokens per streamed message, at least. 1: a message for each engine step."""

    # How it ends.
    withdrawal_grace: float = 0.0
    """Seconds between saying NOT_SERVING and closing the door, so that load balancers can leave first."""
    shutdown_timeout: float = 20.0
    """Seconds that calls in flight have to finish, after that; what is left then is cancelled (UNAVAILABLE). 0: no wait."""
    on_engine_death: OnEngineDeath | None = None
    """``exit``: drain and raise; ``stay``: be NOT_SERVING until it comes back. None: exit if the server opened the engine."""

    # What it bears.
    limits: ServerLimits = field(default_factory=lambda: ServerLimits(max_message_size=MAX_MESSAGE_SIZE))
    """Bounds of connections and calls: see :mod:`trio_frontend.rpc.limits`."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host", self.host, "an address or a name is needed")
        _check_port("port", self.port)
        if self.control_address is not None:
            _check_port("control_address", self.control_address[1])
        # sun_path of sockaddr_un: 108 bytes with its NUL, see unix(7).
        if self.unix_socket is not None and not 0 < len(os.fsencode(self.unix_socket)) <= 107:
            raise ConfigError("unix_socket", self.unix_socket, "a path of 1 to 107 bytes")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                # The value is a secret, so this error says less than the others.
                raise ConfigError("api_key", "...", "a key is printable ASCII without space at its ends, and not empty")
        for name in self.served_model_names:
            if not name:
                raise ConfigError("served_model_name", name, "a name must not be empty")
        if len(set(self.served_model_names)) < len(self.served_model_names):
            raise ConfigError("served_model_name", self.served_model_names, "each name once")
        for module in self.lora_modules:
            if module.name in self.served_model_names:
                raise ConfigError("lora_modules", module.name, "this is the name of the model itself")
        if self.max_logprobs < -1:
            raise ConfigError("max_logprobs", self.max_logprobs, "-1 (no limit) or a count")
        if self.structured_outputs_backend not in ("xgrammar", "guidance", "outlines", "lm-format-enforcer"):
            raise ConfigError(
                "structured_outputs_backend",
                self.structured_outputs_backend,
                "xgrammar, guidance, outlines or lm-format-enforcer",
            )
        _check_at_least("stream_interval", self.stream_interval, 1, "tokens")
        _check_seconds("withdrawal_grace", self.withdrawal_grace)
        _check_seconds("shutdown_timeout", self.shutdown_timeout)
        if self.on_engine_death is not None and self.on_engine_death not in get_args(OnEngineDeath):
            raise ConfigError("on_engine_death", self.on_engine_death, "exit or stay")


def split_address(field: str, value: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT`` as a pair. Raises ConfigError naming ``field``."""
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(field, value, "an IPv6 address needs brackets: [::1]:50051")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(field, value, "HOST:PORT is needed")
    _check_port(field, int(port))
    return host, int(port)


def _check_port(field: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(field, port, "a port is between 0 and 65535")


def _check_seconds(field: str, value: float) -> None:
    if math.isnan(value) or value < 0:
        raise ConfigError(field, value, "seconds, 0 or more")


def _check_at_least(field: str, value: int, least: int, unit: str) -> None:
    if value < least:
        raise ConfigError(field, value, f"{unit}, {least} or more")
