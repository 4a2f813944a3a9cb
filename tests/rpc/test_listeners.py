"""Protects where connections come from: addresses, socket files, descriptors, and TLS with HTTP/2 by ALPN."""

from __future__ import annotations

import os
import pathlib
import socket
import ssl
import stat
from contextlib import suppress

import pytest
import trio
import trustme
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import Client, Response, framed, service, value
from tests.rpc.http2 import wire
from trio_frontend import rpc


async def peer(message: BytesValue, request: rpc.Call) -> BytesValue:
    return value(request.peer.encode())


async def call(stream: trio.abc.Stream) -> Response:
    client = Client(stream)
    await client.start()
    response = await client.call(b"")
    await client.aclose()
    return response


async def test_a_host_that_no_name_service_knows_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:50051: ."):
        await rpc.listen_tcp(50051, "no.such.host.invalid")


async def test_the_default_is_the_loopback_address_and_a_port_of_the_systems_choice() -> None:
    [listener] = await rpc.listen_tcp()
    host, port = listener.address
    assert host == "127.0.0.1"
    assert port != 0
    listener.close()


async def test_the_short_way_serves_and_tells_its_address() -> None:
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(rpc.serve, [service(peer)])
        response = await call(await trio.open_tcp_stream(*address))
        assert response.messages[0].startswith(b"ipv4:127.0.0.1:")
        nursery.cancel_scope.cancel()


async def test_several_listeners_at_once(tmp_path: pathlib.Path) -> None:
    server = rpc.Server([service(peer)])
    path = tmp_path / "rpc.sock"
    listeners = [*await rpc.listen_tcp(), *await rpc.listen_tcp(host="::1"), rpc.listen_unix(path)]
    async with trio.open_nursery() as nursery:
        v4, v6, unix = await nursery.start(server.serve, listeners)
        assert (await call(await trio.open_tcp_stream(*v4))).messages[0].startswith(b"ipv4:127.0.0.1:")
        assert (await call(await trio.open_tcp_stream(*v6))).messages[0].startswith(b"ipv6:[::1]:")
        assert (await call(await trio.open_unix_socket(unix))).messages == [f"unix:{path}".encode()]
        await server.shutdown(0)
    assert not path.exists()
    with pytest.raises(OSError, match="all attempts to connect"):
        await trio.open_tcp_stream(*v4)


async def test_a_name_listens_on_one_port_of_each_of_its_addresses() -> None:
    listeners = await rpc.listen_tcp(host="localhost")
    assert len({listener.address[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()


async def test_a_port_that_is_taken_is_named() -> None:
    [taken] = await rpc.listen_tcp()
    port = int(taken.address[1])
    with pytest.raises(OSError, match=f"cannot listen on .*{port}"):
        await rpc.listen_tcp(port)
    taken.close()


async def test_a_port_may_be_shared_when_both_ask_for_it() -> None:
    [first] = await rpc.listen_tcp(reuse_port=True)
    [second] = await rpc.listen_tcp(int(first.address[1]), reuse_port=True)
    assert first.address == second.address
    first.close()
    second.close()


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rpc.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    listener = rpc.listen_unix(path, mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    listener.close()
    assert not path.exists()


def test_a_socket_file_in_use_and_a_file_that_is_none_are_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rpc.sock"
    listener = rpc.listen_unix(path)
    with pytest.raises(OSError, match="another server"):
        rpc.listen_unix(path)
    listener.close()
    path.write_text("notes")
    with pytest.raises(OSError, match="no socket"):
        rpc.listen_unix(path)
    assert path.read_text() == "notes"


def test_a_socket_file_that_another_has_replaced_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rpc.sock"
    first = rpc.listen_unix(path)
    path.unlink()
    second = rpc.listen_unix(path)
    first.close()
    assert path.exists()
    second.close()


async def test_an_inherited_descriptor_is_served() -> None:
    inherited = socket.create_server(("127.0.0.1", 0))
    listener = rpc.listen_fd(inherited.detach())
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(rpc.serve, [service(peer)], [listener])
        assert (await call(await trio.open_tcp_stream(*address))).status == 0
        nursery.cancel_scope.cancel()


def test_a_descriptor_that_cannot_be_served_is_refused() -> None:
    with socket.socket() as plain, pytest.raises(ValueError, match="no listening stream socket"):
        rpc.listen_fd(plain.fileno())
    with pytest.raises(OSError, match="file descriptor 99999"):
        rpc.listen_fd(99999)
    read, write = os.pipe()
    with pytest.raises(OSError, match=f"file descriptor {read}"):
        rpc.listen_fd(read)
    os.close(read)
    os.close(write)


CA = trustme.CA()


def server_context(tmp_path: pathlib.Path, *, client_ca: bool = False) -> ssl.SSLContext:
    certificate = CA.issue_cert("localhost", "127.0.0.1")
    chain, key, ca = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(key))
    CA.cert_pem.write_to_path(str(ca))
    return rpc.tls_context(chain, key, client_ca=ca if client_ca else None)


def client_context(alpn: list[str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    CA.configure_trust(context)
    context.set_alpn_protocols(["h2"] if alpn is None else alpn)
    return context


async def over_tls(address: tuple[str, int], context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    return trio.SSLStream(await trio.open_tcp_stream(*address), context, server_hostname="localhost")


async def test_calls_go_over_tls_and_see_the_clients_certificate(tmp_path: pathlib.Path) -> None:
    async def who(message: BytesValue, request: rpc.Call) -> BytesValue:
        assert request.peer_certificate is not None
        [(kind, name)] = request.peer_certificate["subjectAltName"]
        return value(f"{kind} {name}".encode())

    context = client_context()
    CA.issue_cert("client.example").configure_cert(context)
    listeners = await rpc.listen_tcp(tls=server_context(tmp_path, client_ca=True))
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(rpc.serve, [service(who)], listeners)
        response = await call(await over_tls(address, context))
        assert response.messages == [b"DNS client.example"]
        nursery.cancel_scope.cancel()


async def test_a_client_without_a_certificate_has_none_to_show(tmp_path: pathlib.Path) -> None:
    async def who(message: BytesValue, request: rpc.Call) -> BytesValue:
        return value(repr(request.peer_certificate).encode())

    async with trio.open_nursery() as nursery:
        listeners = await rpc.listen_tcp(tls=server_context(tmp_path))
        [address] = await nursery.start(rpc.serve, [service(who)], listeners)
        assert (await call(await over_tls(address, client_context()))).messages == [b"None"]
        nursery.cancel_scope.cancel()


async def test_mtls_refuses_a_client_without_a_certificate(tmp_path: pathlib.Path) -> None:
    server = rpc.Server([service(peer)])
    async with trio.open_nursery() as nursery:
        listeners = await rpc.listen_tcp(tls=server_context(tmp_path, client_ca=True))
        [address] = await nursery.start(server.serve, listeners)
        client = Client(await over_tls(address, client_context()))
        with suppress(trio.BrokenResourceError):
            await client.start()
        assert not await client.read()
        await client.aclose()
        await server.shutdown(0)


@pytest.mark.parametrize("alpn", [[], ["http/1.1"]])
async def test_a_client_that_does_not_choose_h2_is_closed(tmp_path: pathlib.Path, alpn: list[str]) -> None:
    server = rpc.Server([service(peer)])
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp(tls=server_context(tmp_path)))
        stream = await over_tls(address, client_context(alpn))
        with trio.fail_after(5), suppress(trio.BrokenResourceError):
            await stream.do_handshake()
            assert not await stream.receive_some(100)
        await trio.aclose_forcefully(stream)
        await server.shutdown(0)
    assert server.live_connections == 0


async def test_a_tls_handshake_that_does_not_end_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    server = rpc.Server([service(peer)], limits=rpc.ServerLimits(preface_timeout=0.1))
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp(tls=server_context(tmp_path)))
        stream = await trio.open_tcp_stream(*address)
        with trio.fail_after(5):
            assert not await stream.receive_some(100)
        await server.shutdown(0)


async def test_a_shutdown_does_not_wait_for_a_tls_handshake(tmp_path: pathlib.Path) -> None:
    server = rpc.Server([service(peer)])
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp(tls=server_context(tmp_path)))
        stream = await trio.open_tcp_stream(*address)
        while not server.live_connections:
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(2):
            await server.shutdown(60)
        await trio.aclose_forcefully(stream)


async def test_plain_bytes_on_a_tls_port_are_closed(tmp_path: pathlib.Path) -> None:
    server = rpc.Server([service(peer)])
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(server.serve, await rpc.listen_tcp(tls=server_context(tmp_path)))
        client = Client(await trio.open_tcp_stream(*address))
        await client.send(b"GET / HTTP/1.1\r\n\r\n")
        with trio.fail_after(5):
            assert not await client.read()
        await server.shutdown(0)


async def test_large_messages_go_over_tls_both_ways(tmp_path: pathlib.Path) -> None:
    async def echo(message: BytesValue) -> BytesValue:
        return message

    async with trio.open_nursery() as nursery:
        listeners = await rpc.listen_tcp(tls=server_context(tmp_path))
        [address] = await nursery.start(rpc.serve, [service(echo)], listeners)
        client = Client(await over_tls(address, client_context()))
        await client.start(INITIAL_WINDOW_SIZE=2_000_000)
        await client.send(wire.window_update(0, 2_000_000))
        content = os.urandom(500_000)
        stream_id, frames = client.request(end=False)
        await client.send(frames)
        body = framed(content)
        async with trio.open_nursery() as sending:
            sending.start_soon(client.response, stream_id)
            for i in range(0, len(body), 16_000):
                await client.send(wire.data(stream_id, body[i : i + 16_000]))
                await trio.testing.wait_all_tasks_blocked(0.002)
            await client.send(wire.data(stream_id, b"", wire.END_STREAM))
        assert client.responses[stream_id].messages == [content]
        await client.aclose()
        nursery.cancel_scope.cancel()
