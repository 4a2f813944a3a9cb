"""How a client command makes its calls: the channel that its options ask for, and failures as one line."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Awaitable, Callable

import trio

from trio_frontend.client import Channel, RpcError, connect, tls_context

from .arguments import api_key, check_files
from .errors import CommandError, UsageError

__all__ = ["call"]


def call(args: argparse.Namespace, command: Callable[[argparse.Namespace, Channel], Awaitable[int]]) -> int:
    """Run ``command(args, channel)`` over the channel that ``args`` describe (:func:`.arguments.add_client_options`).

    Raises CommandError for whatever the server or the connection says, UsageError for an address or key that cannot be.
    """
    return trio.run(_call, args, command, restrict_keyboard_interrupt_to_checkpoints=True)


async def _call(args: argparse.Namespace, command: Callable[[argparse.Namespace, Channel], Awaitable[int]]) -> int:
    timeout = args.timeout if args.timeout is not None else float("inf")
    key = api_key(args)
    try:
        with trio.fail_after(timeout):
            async with connect(
                args.address,
                ssl_context=_tls(args),
                metadata=[("authorization", f"Bearer {key}")] if key is not None else (),
            ) as channel:
                return await command(args, channel)
    except trio.TooSlowError:
        raise CommandError(f"no answer from {args.address} within {timeout:g} s") from None
    except RpcError as error:
        raise CommandError(str(error)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    if not (args.tls or args.ssl_ca_certs or args.ssl_certfile):
        return None
    check_files(args, "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    try:
        return tls_context(args.ssl_ca_certs, args.ssl_certfile, args.ssl_keyfile)
    except OSError as error:
        raise UsageError(f"TLS files cannot be used: {error}") from error
