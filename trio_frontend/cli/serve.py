"""``trio-frontend serve``: its arguments, and what they mean. What runs is in :mod:`trio_frontend.cli.process`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .arguments import API_KEY_VARIABLE, check_files, port, positive, seconds
from .errors import UsageError

if TYPE_CHECKING:
    from trio_frontend.config import ServerConfig

__all__ = ["EngineChoice", "add_commands", "choose_engine", "server_config"]

LORA_PATH_PREFIXES = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"
"""vLLM's name for the directories, separated as in PATH, from which callers may load adapters at run time."""

EngineKind = Literal["embedded", "owned vLLM", "external vLLM"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine serves. ``model`` None is the model that comes with the package."""

    kind: EngineKind
    model: str | None


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model",
        usage="%(prog)s [MODEL] [options] [-- VLLM FLAGS]",
        description="Serve a model over vLLM's gRPC API.",
        epilog="Which engine serves: without MODEL the small model of the package, in this process; a directory with an ONNX "
        "export, in this process too; with --handshake-address the vLLM engine that connects there; any other MODEL: a vLLM "
        "engine that is started here, with the flags after '--'. --engine decides where you want otherwise.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory, or a name on the Hugging Face hub")
    parser.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names of the model in requests (default: MODEL)"
    )

    where = parser.add_argument_group("where it listens")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s; 0.0.0.0 for every interface)"
    )
    where.add_argument("--port", type=port, default=50051, help="TCP port; 0 lets the system choose (default: %(default)s)")
    where.add_argument("--uds", metavar="PATH", help="serve on this Unix socket instead of TCP")
    where.add_argument(
        "--control-address", metavar="HOST:PORT", help="serve vllm.Control here and only here (default: with the rest)"
    )
    where.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help=f"ask callers for 'authorization: Bearer KEY' on everything but health (also ${API_KEY_VARIABLE})",
    )
    where.add_argument("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate (PEM); read again on SIGHUP")
    where.add_argument("--ssl-keyfile", metavar="FILE", help="its key (PEM), if it is not in the same file")
    where.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of client certificates (PEM)")
    where.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="client certificates: 0 not asked for, 1 optional, 2 required (default: 0)",
    )
    where.add_argument("--ssl-ciphers", metavar="LIST", help="OpenSSL's cipher list for TLS 1.2")

    ending = parser.add_argument_group("how it ends")
    ending.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=20.0,
        metavar="S",
        help="seconds for calls in flight to finish (default: 20)",
    )
    ending.add_argument(
        "--withdrawal-grace",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds to go on serving after health says NOT_SERVING, for balancers to leave (default: 0)",
    )
    ending.add_argument(
        "--on-engine-death",
        choices=("exit", "stay"),
        help="drain and exit with 1, or stay NOT_SERVING until it is back (default: exit; stay with --handshake-address)",
    )

    engine = parser.add_argument_group("the engine")
    engine.add_argument("--engine", choices=("embedded", "vllm"), help="where the model runs (default: see below)")
    engine.add_argument(
        "--handshake-address", metavar="tcp://HOST:PORT", help="wait here for vLLM engines started elsewhere"
    )
    engine.add_argument("--vllm", metavar="PATH", help="the vllm command to start (default: the one on PATH)")
    engine.add_argument(
        "--data-parallel-size", type=positive, default=1, metavar="N", help="engines to wait for (default: 1)"
    )
    engine.add_argument("--advertise-host", metavar="HOST", help="our address as engines on other machines reach it")
    engine.add_argument("--tokenizer", metavar="MODEL", help="where the tokenizer comes from (default: MODEL)")
    engine.add_argument("--hf-config-path", metavar="MODEL", help="where config.json comes from (default: MODEL)")
    engine.add_argument(
        "--generation-config",
        default="auto",
        metavar="WHERE",
        help="sampling defaults: 'auto' for the model's generation_config.json, 'vllm' for neutral ones, or a directory",
    )
    engine.add_argument(
        "--structured-outputs-backend",
        choices=("xgrammar", "guidance", "outlines", "lm-format-enforcer"),
        default="xgrammar",
        help="what the engine compiles structured output with (default: %(default)s)",
    )
    engine.add_argument(
        "--max-logprobs", type=int, default=20, metavar="N", help="most candidates per position (default: 20)"
    )
    engine.add_argument(
        "--stream-interval", type=positive, default=1, metavar="N", help="tokens per streamed message, at least (default: 1)"
    )
    engine.add_argument(
        "--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="LoRA adapters to load before serving"
    )
    engine.add_argument(
        "--stall-timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="NOT_SERVING while requests run and no output came for so many seconds (default: 0, off)",
    )
    engine.add_argument(
        "--engine-reconnect",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take an engine in again that comes back with a new handshake (default: yes)",
    )
    engine.add_argument(
        "--engine-heartbeat-timeout",
        type=seconds,
        default=0.9,
        metavar="S",
        help="an engine on another host that gave no sign of life for so many seconds is lost (default: 0.9; 0: never)",
    )
    engine.add_argument(
        "--engine-start-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for the engine to get ready (default: 600)",
    )

    logs = parser.add_argument_group("its log, on stderr")
    logs.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: %(default)s"
    )
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")


def choose_engine(model: str | None, engine: str | None, handshake_address: str | None) -> EngineChoice:
    """Which engine serves, from the three arguments that decide it. Raises UsageError if they contradict each other."""
    if handshake_address is not None:
        if engine == "embedded":
            raise UsageError("--handshake-address is where a vLLM engine connects: it does not go with --engine embedded")
        if model is None:
            raise UsageError("MODEL is needed with --handshake-address: its tokenizer and config are read here")
        return EngineChoice("external vLLM", model)
    if engine == "vllm":
        if model is None:
            raise UsageError("MODEL is needed with --engine vllm: the model of the package is an ONNX export")
        return EngineChoice("owned vLLM", model)
    if engine == "embedded" or model is None or _has_onnx_export(Path(model)):
        return EngineChoice("embedded", model)
    return EngineChoice("owned vLLM", model)


def _has_onnx_export(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("model.onnx", "onnx/model.onnx"))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The arguments as a checked config. Raises UsageError naming the flag."""
    from trio_frontend.config import ConfigError, LoraModule, ServerConfig, TlsConfig, split_address

    tls = None
    if args.ssl_certfile is not None:
        check_files(args, "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    else:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')} needs --ssl-certfile")
    keys = args.api_key or [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]
    try:
        if args.ssl_certfile is not None:
            tls = TlsConfig(
                certfile=args.ssl_certfile,
                keyfile=args.ssl_keyfile,
                ca_certs=args.ssl_ca_certs,
                cert_reqs=args.ssl_cert_reqs,
                ciphers=args.ssl_ciphers,
            )
        return ServerConfig(
            host=args.host,
            port=args.port,
            unix_socket=args.uds,
            control_address=split_address("control_address", args.control_address) if args.control_address else None,
            api_keys=tuple(keys),
            tls=tls,
            model=args.model,
            tokenizer=args.tokenizer,
            hf_config_path=args.hf_config_path,
            generation_defaults=_generation_defaults(args.generation_config),
            served_model_names=tuple(args.served_model_name),
            lora_path_prefixes=tuple(
                prefix for prefix in os.environ.get(LORA_PATH_PREFIXES, "").split(os.pathsep) if prefix
            ),
            lora_modules=tuple(LoraModule(*_name_and_path(text)) for text in args.lora_modules),
            max_logprobs=args.max_logprobs,
            structured_outputs_backend=args.structured_outputs_backend,
            stream_interval=args.stream_interval,
            withdrawal_grace=args.withdrawal_grace,
            shutdown_timeout=args.shutdown_timeout,
            on_engine_death=args.on_engine_death or ("stay" if args.handshake_address else "exit"),
        )
    except ConfigError as error:
        flag = "--uds" if error.field == "unix_socket" else f"--{error.field.replace('_', '-')}"
        raise UsageError(f"{flag} {error.value}: {error.problem}") from error


def run(args: argparse.Namespace) -> int:
    choice = choose_engine(args.model, args.engine, args.handshake_address)
    if args.passed_through and choice.kind != "owned vLLM":
        raise UsageError(f"flags after '--' are for a vLLM engine started here, and this is the {choice.kind} engine")
    config = server_config(args)
    from .process import run_server

    return run_server(args, choice, config)


def _name_and_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(f"--lora-modules {text}: NAME=PATH is needed")
    return name, path


def _generation_defaults(where: str) -> dict[str, Any] | None:
    """What ``--generation-config`` says, as vLLM has it. None: the model's own."""
    if where in ("auto", "vllm"):
        return None if where == "auto" else {}
    path = Path(where) / "generation_config.json"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--generation-config {where}: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"--generation-config {where}: {path} holds no JSON object")
    return values
