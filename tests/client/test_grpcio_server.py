"""Protects the client against a peer that no one here wrote: calls, statuses, deadlines, cancellation, loss, TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import pytest
import trio
import trustme

from tests.client.grpcio_server import serve
from trio_frontend.client import RpcError, StatusCode, connect, tls_context
from trio_frontend.protos.vllm.inference_grpc import InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest


async def seen(event: object) -> None:
    """Wait until a server's thread has set ``event``."""
    with trio.fail_after(10):
        assert await trio.to_thread.run_sync(event.wait, 9)  # type: ignore[attr-defined]


async def refusal(stub: InferenceStub) -> RpcError:
    """Call until a new call is UNAVAILABLE; one that races with the server's end may be CANCELLED by it."""
    with trio.fail_after(10):
        while True:
            try:
                await stub.Generate(GenerateRequest(text="x"))
            except RpcError as error:
                if error.code is not StatusCode.CANCELLED:
                    return error


async def test_a_unary_call_gets_its_answer() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            answer = await InferenceStub(channel).Generate(GenerateRequest(text="hello"))
    assert answer.outputs.text == "hello"


async def test_many_calls_share_a_connection() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            answers: dict[int, str] = {}

            async def call(number: int) -> None:
                answers[number] = (await stub.Generate(GenerateRequest(text=f"text {number}"))).outputs.text

            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(call, number)
    assert answers == {number: f"text {number}" for number in range(50)}


async def test_a_stream_ends_after_its_last_message() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="count:500")) as responses:
                indexes = [response.outputs.index async for response in responses]
                assert dict(responses.initial_metadata)["kind"] == "count"
    assert indexes == list(range(500))


async def test_a_stub_called_as_purerpc_has_it_streams_too() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            responses = InferenceStub(channel).GenerateStream(GenerateRequest(text="count:3"))
            assert [response.outputs.index async for response in responses] == [0, 1, 2]


async def test_a_status_is_one_exception_with_code_message_and_trailers() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            with pytest.raises(RpcError) as caught:
                await InferenceStub(channel).Generate(GenerateRequest(text="fail"))
    error = caught.value
    assert (error.code, error.message) == (StatusCode.FAILED_PRECONDITION, "cannot: 100% \u00e4")
    assert dict(error.trailing_metadata) == {"reason": "asked to", "reason-bin": b"\x00\xff"}
    assert str(error) == "FAILED_PRECONDITION: cannot: 100% \u00e4"


async def test_a_failing_stream_first_gives_what_came() -> None:
    texts = []
    with serve() as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="fail")) as responses:
                texts.append((await anext(responses)).outputs.text)
                with pytest.raises(RpcError, match="INTERNAL: it broke"):
                    await anext(responses)
    assert texts == ["before"]


async def test_an_unknown_method_is_unimplemented() -> None:
    from trio_frontend.protos.vllm.control_grpc import ControlStub
    from trio_frontend.protos.vllm.control_pb2 import GetServerInfoRequest

    with serve() as (address, _, _):
        async with connect(address) as channel:
            with pytest.raises(RpcError) as caught:
                await ControlStub(channel).GetServerInfo(GetServerInfoRequest())
    assert caught.value.code is StatusCode.UNIMPLEMENTED


async def test_metadata_of_the_channel_and_of_the_call_arrive() -> None:
    with serve() as (address, inference, _):
        async with connect(address, metadata=[("authorization", "Bearer k")]) as channel:
            stub = InferenceStub(channel)
            await stub.Generate(GenerateRequest(text="x"), metadata=[("trace", "a b"), ("trace-bin", b"\x00\x01\xfe")])
    (metadata,) = inference.metadata
    assert metadata["authorization"] == "Bearer k"
    assert metadata["trace"] == "a b"
    assert metadata["trace-bin"] == b"\x00\x01\xfe"


@pytest.mark.parametrize(
    "pair", [("Upper", "x"), ("grpc-x", "x"), ("x", "a\r\nb"), ("x", b"x"), ("x-bin", "x"), ("x y", "x")]
)
async def test_metadata_that_cannot_be_sent_is_refused_by_name(pair: tuple[str, str]) -> None:
    with serve() as (address, inference, _):
        async with connect(address) as channel:
            with pytest.raises(ValueError, match=f"metadata (name )?'{pair[0]}'"):
                await InferenceStub(channel).Generate(GenerateRequest(text="x"), metadata=[pair])
        assert inference.metadata == []


@pytest.mark.parametrize(("seconds", "within"), [(5.0, 0.5), (2000.5, 2.0)])
async def test_the_deadline_of_the_scope_travels(seconds: float, within: float) -> None:
    with serve() as (address, inference, _):
        async with connect(address) as channel:
            with trio.fail_after(seconds):
                await InferenceStub(channel).Generate(GenerateRequest(text="x"))
            await InferenceStub(channel).Generate(GenerateRequest(text="x"))
    limited, unlimited = inference.time_remaining
    assert limited == pytest.approx(seconds, abs=within)
    assert unlimited is None or unlimited > 1e6


async def test_an_expired_scope_ends_the_call_on_both_sides() -> None:
    with serve() as (address, inference, _):
        async with connect(address) as channel:
            with trio.move_on_after(0.05) as scope:
                await InferenceStub(channel).Generate(GenerateRequest(text="hang"))
            assert scope.cancelled_caught
            await seen(inference.cancelled)


async def test_a_cancelled_unary_call_is_reset_and_the_connection_goes_on() -> None:
    with serve() as (address, inference, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stub.Generate, GenerateRequest(text="hang"))
                await seen(inference.started)
                nursery.cancel_scope.cancel()
            await seen(inference.cancelled)
            assert (await stub.Generate(GenerateRequest(text="still here"))).outputs.text == "still here"


async def test_leaving_the_scope_of_a_stream_cancels_it() -> None:
    with serve() as (address, inference, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="hang")) as responses:
                assert (await anext(responses)).outputs.text == "one"
            await seen(inference.cancelled)
            assert (await stub.Generate(GenerateRequest(text="still here"))).outputs.text == "still here"


async def test_a_consumer_that_reads_nothing_stops_only_its_own_call() -> None:
    with serve() as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            # 5 MB against a window of 1 MiB
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="count:5000")) as slow:
                for _ in range(100):
                    assert (await stub.Generate(GenerateRequest(text="x"))).outputs.text == "x"
                indexes = [response.outputs.index async for response in slow]
    assert indexes == list(range(5000))


async def test_messages_larger_than_the_windows_pass_both_ways() -> None:
    with serve(options=(("grpc.max_receive_message_length", -1),)) as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            assert len((await stub.Generate(GenerateRequest(text="large:20000000"))).outputs.text) == 20_000_000
            text = "y" * 8_000_000
            assert (await stub.Generate(GenerateRequest(text=text))).outputs.text == text


async def test_an_answer_larger_than_allowed_is_resource_exhausted() -> None:
    with serve() as (address, _, _):
        async with connect(address, max_message_size=1000) as channel:
            stub = InferenceStub(channel)
            with pytest.raises(RpcError, match="larger than 1000") as caught:
                await stub.Generate(GenerateRequest(text="large:2000"))
            assert (await stub.Generate(GenerateRequest(text="small"))).outputs.text == "small"
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED


async def test_a_request_that_the_server_refuses_halfway_ends_with_its_status() -> None:
    with serve(options=(("grpc.max_receive_message_length", 1000),)) as (address, _, _):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            with pytest.raises(RpcError) as caught:
                await stub.Generate(GenerateRequest(text="y" * 8_000_000))
            assert (await stub.Generate(GenerateRequest(text="small"))).outputs.text == "small"
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED


async def test_a_graceful_shutdown_lets_the_call_in_flight_finish_and_refuses_new_ones() -> None:
    with serve() as (address, inference, server):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="hang")) as responses:
                await anext(responses)
                server.stop(grace=10)
                assert (await refusal(stub)).code is StatusCode.UNAVAILABLE
                inference.go_on.set()
                assert [response async for response in responses] == []


async def test_a_server_that_dies_makes_every_call_unavailable() -> None:
    with serve() as (address, _, server):
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest(text="hang")) as responses:
                await anext(responses)
                server.stop(grace=None)
                with pytest.raises(RpcError) as caught, trio.fail_after(10):
                    await anext(responses)
            assert caught.value.code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
            assert (await refusal(stub)).code is StatusCode.UNAVAILABLE


async def test_no_server_is_unavailable_and_says_where() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    with pytest.raises(RpcError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused") as caught:
        async with connect(f"127.0.0.1:{port}"):
            pass
    assert caught.value.code is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("address", ["", "host", "host:", "::1:50051", "host:port", "host:70000", "unix:"])
async def test_a_bad_address_is_a_value_error(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        async with connect(address):
            pass


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def server_credentials(authority: trustme.CA, host: str, *, mutual: bool) -> grpc.ServerCredentials:
    certificate = authority.issue_cert(host)
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    ca = authority.cert_pem.bytes() if mutual else None
    return grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)], ca, mutual)


async def test_calls_go_over_tls_and_with_a_client_certificate(authority: trustme.CA, ca_file: str, tmp_path: Path) -> None:
    certificate = authority.issue_cert("client.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    with serve(credentials=server_credentials(authority, "127.0.0.1", mutual=True)) as (address, _, _):
        context = tls_context(ca_file, str(tmp_path / "client.pem"))
        async with connect(address, ssl_context=context) as channel:
            assert (await InferenceStub(channel).Generate(GenerateRequest(text="secret"))).outputs.text == "secret"


async def test_a_certificate_for_another_name_is_unavailable(authority: trustme.CA, ca_file: str) -> None:
    credentials = server_credentials(authority, "other.example", mutual=False)
    with serve(credentials=credentials) as (address, _, _), pytest.raises(RpcError, match="no TLS with") as caught:
        async with connect(address, ssl_context=tls_context(ca_file)):
            pass
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert isinstance(caught.value.__cause__, trio.BrokenResourceError | ssl.SSLError)


async def test_tls_to_a_server_without_it_is_unavailable(ca_file: str) -> None:
    with serve() as (address, _, _), pytest.raises(RpcError, match="no TLS with"), trio.fail_after(10):
        async with connect(address, ssl_context=tls_context(ca_file)):
            pass


async def test_an_error_of_the_body_leaves_the_channels_scope_as_it_is() -> None:
    with serve() as (address, _, _), pytest.raises(KeyError, match="mine"):
        async with connect(address):
            raise KeyError("mine")
