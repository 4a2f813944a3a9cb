"""Protects a server with API keys: nobody without one calls anything but health."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from trio_frontend import rpc
from trio_frontend.client import RpcError, StatusCode, connect
from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest
from trio_frontend.protos.vllm.inference_grpc import InferenceServicer, InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, GenerateResponse
from trio_frontend.services.auth import require_api_key
from trio_frontend.services.health import HealthService
from trio_frontend.services.reflection import reflection_services

KEYS = ["first-key", "second-key"]


class Counting(InferenceServicer):
    calls = 0

    async def Generate(self, input_message: GenerateRequest) -> GenerateResponse:
        self.calls += 1
        return GenerateResponse()

    async def GenerateStream(self, input_message: GenerateRequest, request: Any) -> None:
        self.calls += 1
        await request.send(GenerateResponse())


@pytest.fixture
async def server(nursery: trio.Nursery) -> tuple[str, Counting]:
    inference = Counting()
    services = [inference.service, HealthService(["vllm.Inference"]).service, *reflection_services(["vllm.Inference"])]
    serving = rpc.Server(services, interceptors=[require_api_key(KEYS)])
    ((host, port),) = await nursery.start(serving.serve, await rpc.listen_tcp(0))
    return f"{host}:{port}", inference


@pytest.mark.parametrize("authorization", ["Bearer first-key", "Bearer second-key", "bearer first-key", "BEARER  first-key"])
async def test_a_call_with_a_key_is_served(server: tuple[str, Counting], authorization: str) -> None:
    address, inference = server
    async with connect(address, metadata=[("authorization", authorization)]) as channel:
        stub = InferenceStub(channel)
        await stub.Generate(GenerateRequest())
        async with channel.stream(stub.GenerateStream, GenerateRequest()) as responses:
            assert len([response async for response in responses]) == 1
    assert inference.calls == 2


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-ke", "Bearer first-keyy", "Basic first-key", "first-key"],
)
async def test_a_call_without_one_is_unauthenticated_and_never_runs(
    server: tuple[str, Counting], authorization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address, inference = server
    metadata = [] if authorization is None else [("authorization", authorization)]
    async with connect(address, metadata=metadata) as channel:
        stub = InferenceStub(channel)
        with pytest.raises(RpcError) as caught:
            await stub.Generate(GenerateRequest())
        assert caught.value.code is StatusCode.UNAUTHENTICATED
        async with channel.stream(stub.GenerateStream, GenerateRequest()) as responses:
            with pytest.raises(RpcError) as caught:
                await anext(responses)
        assert caught.value.code is StatusCode.UNAUTHENTICATED
    assert inference.calls == 0
    assert "first-key" not in caplog.text
    assert "wrong" not in caplog.text


async def test_health_needs_no_key(server: tuple[str, Counting]) -> None:
    async with connect(server[0]) as channel:
        await HealthStub(channel).Check(HealthCheckRequest())
        async with channel.stream(HealthStub(channel).Watch, HealthCheckRequest()) as statuses:
            await anext(statuses)


async def test_reflection_needs_a_key(server: tuple[str, Counting]) -> None:
    from trio_frontend.protos.grpc.reflection.v1.reflection_grpc import ServerReflectionStub
    from trio_frontend.protos.grpc.reflection.v1.reflection_pb2 import ServerReflectionRequest

    async def questions() -> Any:
        yield ServerReflectionRequest(list_services="")

    async with connect(server[0]) as channel:
        with pytest.raises(ExceptionGroup) as caught:
            async for _ in ServerReflectionStub(channel).ServerReflectionInfo(questions()):
                pass
    (error,) = caught.value.exceptions
    assert isinstance(error, RpcError)
    assert error.code is StatusCode.UNAUTHENTICATED


def test_no_key_at_all_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        require_api_key([])
