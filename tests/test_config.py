"""Protects the config: whatever cannot be served is refused when the config is made, by field and value."""

from __future__ import annotations

from typing import Any

import pytest

from trio_frontend.config import ConfigError, LoraModule, ServerConfig, TlsConfig, split_address


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("unix_socket", ""),
        ("unix_socket", "x" * 108),
        ("served_model_names", ("",)),
        ("served_model_names", ("a", "a")),
        ("max_logprobs", -2),
        ("structured_outputs_backend", "regexes"),
        ("stream_interval", 0),
        ("withdrawal_grace", -0.1),
        ("withdrawal_grace", float("nan")),
        ("shutdown_timeout", -1),
        ("on_engine_death", "restart"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**{field: value})
    assert str(caught.value).startswith(caught.value.field)
    assert caught.value.field.rstrip("s") in (field, field.rstrip("s"))


def test_the_defaults_listen_on_this_machine_only() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.tls, config.api_keys) == ("127.0.0.1", 50051, None, ())


def test_an_api_key_shows_neither_in_the_repr_nor_in_an_error() -> None:
    assert "hunter2" not in repr(ServerConfig(api_keys=("hunter2",)))
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_keys=("hunter2 ",))
    assert "hunter2" not in str(caught.value)


def test_a_lora_adapter_must_not_take_the_models_own_name() -> None:
    with pytest.raises(ConfigError, match="lora_modules='m'"):
        ServerConfig(served_model_names=("m",), lora_modules=(LoraModule("m", "/adapter"),))


def test_client_certificates_need_an_authority() -> None:
    with pytest.raises(ConfigError, match="ssl_cert_reqs=2"):
        TlsConfig(certfile="cert.pem", cert_reqs=2)


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("host:65535", ("host", 65535)), ("[::1]:50051", ("::1", 50051))],
)
def test_an_address_is_a_host_and_a_port(text: str, pair: tuple[str, int]) -> None:
    assert split_address("control_address", text) == pair


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:65536", "::1:50051", "host:-1", "host:१"])
def test_what_is_no_address_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_address("control_address", text)
    assert str(caught.value).startswith("control_address=")
