"""Protects interoperability: grpcio as the client, through the gRPC project's interop cases, in plaintext and over TLS.

The cases and their numbers are those of the gRPC project's interop-test-descriptions document.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import grpc
import pytest
import trio
import trustme

from tests.rpc.interop import METHODS, Empty, InputRequest, OutputRequest, SimpleRequest, TestService
from trio_frontend import rpc

CA = trustme.CA()


class Stub:
    """The methods of grpc.testing.TestService over a grpcio channel."""

    def __init__(self, channel: grpc.Channel, servicer: TestService, server: rpc.Server) -> None:
        self.channel = channel
        self.servicer = servicer
        self.server = server
        for name, (cardinality, request_type, response_type) in METHODS.items():
            setattr(self, name, self.method("TestService", name, cardinality.name.lower(), request_type, response_type))

    def method(self, service: str, name: str, kind: str, request_type: Any, response_type: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = getattr(self.channel, kind)(
            f"/grpc.testing.{service}/{name}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        return made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def until_idle(self) -> None:
        end = time.monotonic() + 5
        while self.server.running_handlers:
            assert time.monotonic() < end, "a handler is left after its client has gone"
            time.sleep(0.001)


@contextmanager
def serving_in_a_thread(tls: bool, tmp_path: pathlib.Path) -> Iterator[Stub]:
    servicer = TestService()
    server = rpc.Server([servicer])
    started: Queue[tuple[str, int]] = Queue()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        context = None
        if tls:
            certificate = CA.issue_cert("localhost")
            chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
            chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
            certificate.private_key_pem.write_to_path(str(key))
            context = rpc.tls_context(chain, key)
        token.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(server.serve, await rpc.listen_tcp(tls=context))
            started.put(address)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        target = f"localhost:{started.get(timeout=10)[1]}"
        if tls:
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(CA.cert_pem.bytes()))
        else:
            channel = grpc.insecure_channel(target)
        with channel:
            yield Stub(channel, servicer, server)
    finally:
        trio.from_thread.run(server.shutdown, 0, trio_token=token[0])
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module", params=["plaintext", "tls"])
def stub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving_in_a_thread(request.param == "tls", tmp_path_factory.mktemp("tls")) as stub:
        yield stub


def payload(size: int) -> dict[str, bytes]:
    return {"body": bytes(size)}


def sizes(responses: Any) -> list[int]:
    return [len(response.payload.body) for response in responses]


def parameters(*wanted: int) -> list[dict[str, int]]:
    return [{"size": size} for size in wanted]


def failure(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_empty_unary(stub: Any) -> None:
    assert stub.EmptyCall(Empty(), timeout=5) == Empty()


def test_large_unary(stub: Any) -> None:
    response = stub.UnaryCall(SimpleRequest(response_size=314_159, payload=payload(271_828)), timeout=5)
    assert len(response.payload.body) == 314_159


def test_client_compressed_unary(stub: Any) -> None:
    probe = SimpleRequest(expect_compressed={"value": True}, response_size=314_159, payload=payload(271_828))
    code, _ = failure(lambda: stub.UnaryCall(probe, timeout=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    response = stub.UnaryCall(probe, timeout=5, compression=grpc.Compression.Gzip)
    assert len(response.payload.body) == 314_159
    plain = SimpleRequest(expect_compressed={"value": False}, response_size=314_159, payload=payload(271_828))
    assert len(stub.UnaryCall(plain, timeout=5).payload.body) == 314_159


def test_a_client_that_compresses_with_deflate_is_told_what_is_taken(stub: Any) -> None:
    code, details = failure(lambda: stub.EmptyCall(Empty(), timeout=5, compression=grpc.Compression.Deflate))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "deflate" in details


@pytest.mark.parametrize("compressed", [True, False])
def test_server_compressed_unary(stub: Any, compressed: bool) -> None:
    request = SimpleRequest(response_compressed={"value": compressed}, response_size=314_159, payload=payload(271_828))
    assert len(stub.UnaryCall(request, timeout=5).payload.body) == 314_159


def test_client_streaming(stub: Any) -> None:
    requests = [InputRequest(payload=payload(size)) for size in (27_182, 8, 1_828, 45_904)]
    assert stub.StreamingInputCall(iter(requests), timeout=5).aggregated_payload_size == 74_922


def test_client_compressed_streaming(stub: Any) -> None:
    probe = InputRequest(expect_compressed={"value": True}, payload=payload(27_182))
    code, _ = failure(lambda: stub.StreamingInputCall(iter([probe]), timeout=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    both = [probe, InputRequest(expect_compressed={"value": True}, payload=payload(45_904))]
    response = stub.StreamingInputCall(iter(both), timeout=5, compression=grpc.Compression.Gzip)
    assert response.aggregated_payload_size == 73_086


def test_server_streaming(stub: Any) -> None:
    wanted = [31_415, 9, 2_653, 58_979]
    responses = stub.StreamingOutputCall(OutputRequest(response_parameters=parameters(*wanted)), timeout=5)
    assert sizes(responses) == wanted


def test_server_compressed_streaming(stub: Any) -> None:
    wanted = [{"size": 31_415, "compressed": {"value": True}}, {"size": 92_653, "compressed": {"value": False}}]
    assert sizes(stub.StreamingOutputCall(OutputRequest(response_parameters=wanted), timeout=5)) == [31_415, 92_653]


class Sender:
    """A request stream that the test feeds."""

    def __init__(self) -> None:
        self._queue: Queue[Any] = Queue()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


def test_ping_pong(stub: Any) -> None:
    sender = Sender()
    responses = stub.FullDuplexCall(iter(sender), timeout=5)
    for response_size, request_size in ((31_415, 27_182), (9, 8), (2_653, 1_828), (58_979, 45_904)):
        sender.send(OutputRequest(response_parameters=parameters(response_size), payload=payload(request_size)))
        assert len(next(responses).payload.body) == response_size
    sender.end()
    assert list(responses) == []
    assert responses.code() is grpc.StatusCode.OK


def test_empty_stream(stub: Any) -> None:
    responses = stub.FullDuplexCall(iter(()), timeout=5)
    assert list(responses) == []
    assert responses.code() is grpc.StatusCode.OK


METADATA = (
    ("x-grpc-test-echo-initial", "test_initial_metadata_value"),
    ("x-grpc-test-echo-trailing-bin", b"\xab\xab\xab"),
)


def test_custom_metadata(stub: Any) -> None:
    request = SimpleRequest(response_size=314_159, payload=payload(271_828))
    _, call = stub.UnaryCall.with_call(request, timeout=5, metadata=METADATA)
    assert METADATA[0] in call.initial_metadata()
    assert METADATA[1] in call.trailing_metadata()

    sender = Sender()
    duplex = stub.FullDuplexCall(iter(sender), timeout=5, metadata=METADATA)
    sender.send(OutputRequest(response_parameters=parameters(314_159), payload=payload(271_828)))
    sender.end()
    assert METADATA[0] in duplex.initial_metadata()
    assert sizes(duplex) == [314_159]
    assert METADATA[1] in duplex.trailing_metadata()


def test_status_code_and_message(stub: Any) -> None:
    status = {"code": 2, "message": "test status message"}
    assert failure(lambda: stub.UnaryCall(SimpleRequest(response_status=status), timeout=5)) == (
        grpc.StatusCode.UNKNOWN,
        "test status message",
    )
    requests = iter([OutputRequest(response_status=status)])
    assert failure(lambda: list(stub.FullDuplexCall(requests, timeout=5))) == (
        grpc.StatusCode.UNKNOWN,
        "test status message",
    )


def test_special_status_message(stub: Any) -> None:
    message = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
    request = SimpleRequest(response_status={"code": 2, "message": message})
    assert failure(lambda: stub.UnaryCall(request, timeout=5)) == (grpc.StatusCode.UNKNOWN, message)


def test_unimplemented_method(stub: Any) -> None:
    method = stub.method("TestService", "UnimplementedCall", "unary_unary", Empty, Empty)
    assert failure(lambda: method(Empty(), timeout=5))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_unimplemented_service(stub: Any) -> None:
    method = stub.method("UnimplementedService", "UnimplementedCall", "unary_unary", Empty, Empty)
    assert failure(lambda: method(Empty(), timeout=5))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_cancel_after_begin(stub: Any) -> None:
    before = stub.servicer.cancelled
    future = stub.StreamingInputCall.future(iter(Sender()), timeout=5)
    while not stub.server.running_handlers:
        time.sleep(0.001)
    future.cancel()
    assert future.code() is grpc.StatusCode.CANCELLED
    stub.until_idle()
    assert stub.servicer.cancelled == before + 1


def test_cancel_after_first_response(stub: Any) -> None:
    before = stub.servicer.cancelled
    sender = Sender()
    responses = stub.FullDuplexCall(iter(sender), timeout=5)
    sender.send(OutputRequest(response_parameters=parameters(31_415), payload=payload(27_182)))
    assert len(next(responses).payload.body) == 31_415
    responses.cancel()
    assert failure(lambda: next(responses))[0] is grpc.StatusCode.CANCELLED
    stub.until_idle()
    assert stub.servicer.cancelled == before + 1


def test_timeout_on_sleeping_server(stub: Any) -> None:
    before = stub.servicer.cancelled
    sender = Sender()
    responses = stub.FullDuplexCall(iter(sender), timeout=0.05)
    sender.send(OutputRequest(payload=payload(27_182)))
    assert failure(lambda: next(responses))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    stub.until_idle()
    assert stub.servicer.cancelled == before + 1


def test_concurrent_large_unary(stub: Any) -> None:
    request = SimpleRequest(response_size=314_159, payload=payload(271_828))
    futures = [stub.UnaryCall.future(request, timeout=20) for _ in range(50)]
    assert {len(future.result().payload.body) for future in futures} == {314_159}


def test_a_message_cut_by_a_deadline_ends_with_the_deadline(stub: Any) -> None:
    """The client's window is full of messages it does not read when its time is up."""
    responses = stub.StreamingOutputCall(OutputRequest(response_parameters=parameters(*[1_000_000] * 20)), timeout=0.3)
    time.sleep(0.4)
    code, _ = failure(lambda: list(responses))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    stub.until_idle()
