"""TLS by vLLM's flags: a server's context, and its certificate read again while it serves."""

from __future__ import annotations

import logging
import ssl

from trio_frontend import rpc
from trio_frontend.config import TlsConfig

__all__ = ["reload_certificate", "tls_context"]

logger = logging.getLogger(__name__)


def tls_context(config: TlsConfig) -> ssl.SSLContext:
    """A server's context: rpc's own (TLS 1.2 at least, ALPN ``h2``) and what vLLM's flags add.

    Raises ssl.SSLError naming the setting if a file cannot be read or used.
    """
    _check_certificate(config)
    context = rpc.tls_context(config.certfile, config.keyfile or config.certfile)
    if config.ciphers is not None:
        try:
            context.set_ciphers(config.ciphers)
        except ssl.SSLError as error:
            raise ssl.SSLError(f"ssl_ciphers={config.ciphers!r}: {error}") from error
    if config.ca_certs is not None:
        try:
            context.load_verify_locations(config.ca_certs)
        except OSError as error:
            raise ssl.SSLError(f"ssl_ca_certs={config.ca_certs!r}: {error}") from error
    context.verify_mode = ssl.VerifyMode(config.cert_reqs)
    return context


def reload_certificate(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Read certificate and key again: connections made from now on use them, those that are open keep theirs.

    If they cannot be used, ``context`` stays as it is, and the log says why.
    """
    try:
        # A certificate whose key does not fit it is half loaded by the time that OpenSSL notices: so it is tried elsewhere first.
        _check_certificate(config)
        context.load_cert_chain(config.certfile, config.keyfile)
    except ssl.SSLError as error:
        logger.error("the certificate was not reloaded: %s", error)
    else:
        logger.info("the certificate was reloaded")


def _check_certificate(config: TlsConfig) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certfile, config.keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise ssl.SSLError(f"ssl_certfile={config.certfile!r}, ssl_keyfile={config.keyfile!r}: {error}") from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ValueError("an encrypted key needs a password, and a server has no one to ask")
