"""Protects the doors: TLS and mutual TLS by vLLM's flags, a certificate read again, API keys, and reflection of what is behind each."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme

from trio_frontend import ServerConfig, TlsConfig
from trio_frontend.client import Channel, RpcError, StatusCode, connect, tls_context
from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest
from trio_frontend.protos.grpc.reflection.v1.reflection_grpc import ServerReflectionStub
from trio_frontend.protos.grpc.reflection.v1.reflection_pb2 import ServerReflectionRequest
from trio_frontend.protos.vllm.control_grpc import ControlStub
from trio_frontend.protos.vllm.control_pb2 import GetModelInfoRequest
from trio_frontend.server import Server, running
from trio_frontend.testing import ScriptedEngine


class Files:
    """An authority's files: its own certificate, a server's and a client's."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.directory = directory
        self.ca = self._write("ca.pem", self.authority.cert_pem.bytes())
        self.issue_server()
        client = self.authority.issue_cert("client.example")
        self.client = self._write("client.pem", client.private_key_and_cert_chain_pem.bytes())

    def issue_server(self) -> None:
        self.server = self._write(
            "server.pem", self.authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.bytes()
        )

    def _write(self, name: str, content: bytes) -> str:
        (self.directory / name).write_bytes(content)
        return str(self.directory / name)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def serving() -> Callable[..., object]:
    @asynccontextmanager
    async def serve(**settings: object) -> AsyncIterator[Server]:
        async with running(ScriptedEngine(), ServerConfig(port=0, shutdown_timeout=0, **settings)) as server:  # type: ignore[arg-type]
            yield server

    return serve


def address(server: Server, *, control: bool = False) -> str:
    host, port = (server.control_addresses if control else server.addresses)[0]
    return f"{host}:{port}"


async def check(channel: Channel) -> int:
    return (await HealthStub(channel).Check(HealthCheckRequest())).status


async def refused(server: Server, context: ssl.SSLContext | None) -> bool:
    """Whether a call over this kind of connection cannot be made."""
    try:
        with trio.fail_after(10):
            async with connect(address(server), ssl_context=context) as channel:
                await check(channel)
    except RpcError as error:
        return bool(error.code is StatusCode.UNAVAILABLE)
    return False


async def test_with_a_certificate_the_server_speaks_tls_and_nothing_else(serving, files) -> None:
    async with serving(tls=TlsConfig(certfile=files.server)) as server:
        async with connect(address(server), ssl_context=tls_context(files.ca)) as channel:
            assert await check(channel) == 1
        assert await refused(server, None)
        assert await refused(server, tls_context())  # the system's authorities have not signed it


async def test_clients_without_a_certificate_are_turned_away_if_one_is_required(serving, files) -> None:
    async with serving(tls=TlsConfig(certfile=files.server, ca_certs=files.ca, cert_reqs=2)) as server:
        assert await refused(server, tls_context(files.ca))
        async with connect(address(server), ssl_context=tls_context(files.ca, files.client)) as channel:
            assert await check(channel) == 1


async def test_a_certificate_may_be_optional_and_is_checked_if_it_is_shown(serving, files, tmp_path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Files(tmp_path / "other")
    async with serving(tls=TlsConfig(certfile=files.server, ca_certs=files.ca, cert_reqs=1)) as server:
        assert not await refused(server, tls_context(files.ca))
        assert not await refused(server, tls_context(files.ca, files.client))
        assert await refused(server, tls_context(files.ca, stranger.client))


async def test_a_new_certificate_is_for_new_connections_and_old_ones_go_on(serving, files) -> None:
    async with serving(tls=TlsConfig(certfile=files.server)) as server:
        before = await _certificate(server, files)
        async with connect(address(server), ssl_context=tls_context(files.ca)) as channel:
            files.issue_server()
            assert await _certificate(server, files) == before
            server.reload_certificate()
            assert await _certificate(server, files) != before
            assert await check(channel) == 1


@pytest.mark.parametrize("broken", ["no certificate", "key of another"])
async def test_a_broken_certificate_leaves_the_old_one_and_is_logged(serving, files, tmp_path, caplog, broken) -> None:
    certificate = files.authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(certificate.cert_chain_pems[0].bytes())
    key.write_bytes(certificate.private_key_pem.bytes())
    async with serving(tls=TlsConfig(certfile=str(chain), keyfile=str(key))) as server:
        before = await _certificate(server, files)
        if broken == "no certificate":
            chain.write_text(broken)
        else:
            chain.write_bytes(files.authority.issue_cert("127.0.0.1").cert_chain_pems[0].bytes())
        server.reload_certificate()
        assert await _certificate(server, files) == before
        assert "the certificate was not reloaded" in caplog.text


async def _certificate(server: Server, files: Files) -> bytes:
    host, port = server.addresses[0]
    stream = await trio.open_ssl_over_tcp_stream(host, port, ssl_context=tls_context(files.ca), https_compatible=True)
    async with stream:
        await stream.do_handshake()
        return stream.getpeercert(binary_form=True)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"certfile": "/no/such/file"}, "/no/such/file"),
        ({"certfile": __file__}, "test_server_doors.py"),
        ({"ca_certs": __file__, "cert_reqs": 2}, "ssl_ca_certs"),
        ({"ciphers": "NONSENSE"}, "ssl_ciphers='NONSENSE'"),
    ],
)
async def test_tls_that_cannot_be_had_is_an_error_that_names_it(serving, files, broken, named) -> None:
    with pytest.raises(ssl.SSLError, match=named):
        async with serving(tls=TlsConfig(**{"certfile": files.server, **broken})):
            pass


async def test_the_ciphers_are_what_the_flag_says(serving, files) -> None:
    async with serving(tls=TlsConfig(certfile=files.server, ciphers="ECDHE+AES256")) as server:
        narrow = tls_context(files.ca)
        narrow.maximum_version = ssl.TLSVersion.TLSv1_2
        narrow.set_ciphers("ECDHE+AES128")
        assert await refused(server, narrow)
        narrow.set_ciphers("ECDHE+AES256")
        assert not await refused(server, narrow)


async def test_an_api_key_guards_everything_but_health(serving) -> None:
    async with serving(api_keys=("one", "two")) as server:
        async with connect(address(server)) as channel:
            assert await check(channel) == 1
            with pytest.raises(RpcError) as caught:
                await ControlStub(channel).GetModelInfo(GetModelInfoRequest())
            assert caught.value.code is StatusCode.UNAUTHENTICATED
        for key in ("one", "two"):
            async with connect(address(server), metadata=[("authorization", f"Bearer {key}")]) as channel:
                await ControlStub(channel).GetModelInfo(GetModelInfoRequest())


@pytest.mark.parametrize("control", [False, True])
async def test_each_door_reflects_what_is_behind_it(serving, control) -> None:
    async with serving(control_address=("127.0.0.1", 0)) as server:
        names = await _reflected(address(server, control=control))
    common = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    assert names == common | ({"vllm.Control"} if control else {"vllm.Inference", "vllm.Generate"})


async def _reflected(server: str) -> set[str]:
    async def ask() -> AsyncIterator[ServerReflectionRequest]:
        yield ServerReflectionRequest(list_services="")

    async with connect(server) as channel:
        (answer,) = [each async for each in ServerReflectionStub(channel).ServerReflectionInfo(ask())]
    return {service.name for service in answer.list_services_response.service}
