"""Protects the client and the server together: both ends here, over a socket and over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from trio_frontend import rpc
from trio_frontend.client import RpcError, StatusCode, connect
from trio_frontend.protos.vllm.inference_grpc import InferenceServicer, InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import GenerateRequest, GenerateResponse


class Scripted(InferenceServicer):
    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.peers: list[str] = []
        self.ended = trio.Event()
        self.live = 0
        self.most_live = 0

    async def Generate(self, input_message: GenerateRequest, request: rpc.Call) -> GenerateResponse:
        self.deadlines.append(request.deadline)
        self.peers.append(request.peer)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        await trio.lowlevel.checkpoint()
        self.live -= 1
        return GenerateResponse(outputs={"text": input_message.text})

    async def GenerateStream(self, input_message: GenerateRequest, request: rpc.Call) -> None:
        try:
            await request.send(GenerateResponse(outputs={"text": "first"}))
            await trio.sleep_forever()
        finally:
            self.ended.set()


async def start(nursery: trio.Nursery, servicer: Scripted, **options: Any) -> tuple[str, rpc.Server]:
    server = rpc.Server([servicer.service], **options)
    ((host, port),) = await nursery.start(server.serve, await rpc.listen_tcp(0))
    return f"{host}:{port}", server


async def test_leaving_a_streams_scope_ends_its_handler(nursery: trio.Nursery) -> None:
    servicer = Scripted()
    address, _ = await start(nursery, servicer)
    async with connect(address) as channel:
        async with channel.stream(InferenceStub(channel).GenerateStream, GenerateRequest()) as responses:
            assert (await anext(responses)).outputs.text == "first"
        with trio.fail_after(5):
            await servicer.ended.wait()


async def test_leaving_the_channels_scope_ends_its_calls(nursery: trio.Nursery) -> None:
    servicer = Scripted()
    address, _ = await start(nursery, servicer)
    with trio.CancelScope() as scope:
        async with connect(address) as channel:
            stub = InferenceStub(channel)
            async with channel.stream(stub.GenerateStream, GenerateRequest()) as responses:
                async for _ in responses:
                    scope.cancel()
    with trio.fail_after(5):
        await servicer.ended.wait()


async def test_the_nearest_deadline_travels(nursery: trio.Nursery) -> None:
    servicer = Scripted()
    address, _ = await start(nursery, servicer)
    async with connect(address) as channel:
        with trio.fail_after(100), trio.fail_after(3):
            expected = trio.current_effective_deadline()
            await InferenceStub(channel).Generate(GenerateRequest())
    assert servicer.deadlines[0] == pytest.approx(expected, abs=0.5)


async def test_calls_beyond_the_servers_limit_wait_for_their_turn(nursery: trio.Nursery) -> None:
    servicer = Scripted()
    limits = rpc.ServerLimits(http2=rpc.Http2Limits(max_concurrent_streams=2))
    address, _ = await start(nursery, servicer, limits=limits)
    texts: list[str] = []
    async with connect(address) as channel:
        stub = InferenceStub(channel)
        await stub.Generate(GenerateRequest(text="now its settings are here"))

        async def call(number: int) -> None:
            texts.append((await stub.Generate(GenerateRequest(text=str(number)))).outputs.text)

        async with trio.open_nursery() as calls:
            for number in range(20):
                calls.start_soon(call, number)
    assert sorted(texts, key=int) == [str(number) for number in range(20)]
    assert servicer.most_live == 2


async def test_calls_go_over_a_unix_socket(nursery: trio.Nursery, tmp_path: Path) -> None:
    servicer = Scripted()
    path = str(tmp_path / "socket")
    await nursery.start(rpc.Server([servicer.service]).serve, [rpc.listen_unix(path)])
    for address in (f"unix:{path}", f"unix://{path}"):
        async with connect(address) as channel:
            assert (await InferenceStub(channel).Generate(GenerateRequest(text="x"))).outputs.text == "x"
    assert all(peer.startswith("unix:") for peer in servicer.peers)


async def test_a_drained_server_lets_the_stream_end_and_refuses_what_is_new(nursery: trio.Nursery) -> None:
    servicer = Scripted()
    address, server = await start(nursery, servicer)
    async with connect(address) as channel:
        stub = InferenceStub(channel)
        async with channel.stream(stub.GenerateStream, GenerateRequest()) as responses:
            await anext(responses)
            server.begin_shutdown(0.05)
            with pytest.raises(RpcError) as caught:
                await anext(responses)
            assert caught.value.code is StatusCode.UNAVAILABLE
            assert "shutting down" in caught.value.message
        with pytest.raises(RpcError) as caught:
            await stub.Generate(GenerateRequest())
        assert caught.value.code is StatusCode.UNAVAILABLE
