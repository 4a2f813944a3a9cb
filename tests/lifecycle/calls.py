"""Short ways to make the calls that the tests of this folder make."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from trio_frontend.client import Channel, RpcError, StatusCode
from trio_frontend.protos.grpc.health.v1.health_grpc import HealthStub
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from trio_frontend.protos.vllm.control_grpc import ControlStub
from trio_frontend.protos.vllm.inference_grpc import InferenceStub
from trio_frontend.protos.vllm.inference_pb2 import FinishInfo, GenerateRequest, RandomSampling, StoppingCriteria

__all__ = [
    "NOT_SERVING",
    "SERVICE_UNKNOWN",
    "SERVING",
    "ControlStub",
    "FinishInfo",
    "InferenceStub",
    "Outcome",
    "StatusCode",
    "check",
    "failure",
    "generate",
    "prompt",
    "stream",
    "streaming",
    "watching",
]

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


def prompt(
    text: str = "Hi", *, max_tokens: int = 10, n: int = 0, stop: tuple[str, ...] = (), **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        text=text,
        sampling=RandomSampling(num_sequences=n),
        stopping=StoppingCriteria(max_new_tokens=max_tokens, stop_strings=stop),
        **fields,
    )


@dataclass
class Outcome:
    """What a caller has of a call: the text so far, how it finished, and the status if that is no OK."""

    text: str = ""
    finish: int | None = None
    status: StatusCode | None = None
    message: str = ""
    ended: trio.Event = field(default_factory=trio.Event)


async def generate(channel: Channel, request: GenerateRequest | None = None) -> Outcome:
    """Call Generate, and say how it ended."""
    outcome = Outcome()
    try:
        answer = await InferenceStub(channel).Generate(request if request is not None else prompt())
        outcome.text, outcome.finish = answer.outputs.text, answer.outputs.finish_info.finish_reason
    except RpcError as error:
        outcome.status, outcome.message = error.code, error.message
    outcome.ended.set()
    return outcome


async def stream(
    channel: Channel,
    request: GenerateRequest | None = None,
    *,
    task_status: trio.TaskStatus[Outcome] = trio.TASK_STATUS_IGNORED,
) -> Outcome:
    """Call GenerateStream and read it to its end. With ``nursery.start``, the outcome can be looked at while it grows."""
    outcome = Outcome()
    task_status.started(outcome)
    try:
        async with streaming(channel, request) as responses:
            async for response in responses:
                outcome.text += response.outputs.text
                if response.outputs.HasField("finish_info"):
                    outcome.finish = response.outputs.finish_info.finish_reason
    except RpcError as error:
        outcome.status, outcome.message = error.code, error.message
    outcome.ended.set()
    return outcome


@asynccontextmanager
async def streaming(channel: Channel, request: GenerateRequest | None = None) -> AsyncIterator[Any]:
    """GenerateStream's responses; leaving the block cancels the call."""
    stub = InferenceStub(channel)
    async with channel.stream(stub.GenerateStream, request if request is not None else prompt()) as responses:
        yield responses


async def check(channel: Channel, service: str = "") -> int:
    return (await HealthStub(channel).Check(HealthCheckRequest(service=service))).status


@asynccontextmanager
async def watching(channel: Channel, service: str = "", *, deadline: float | None = None) -> AsyncIterator[Any]:
    """A health watch's statuses. ``deadline`` in seconds is the server's to keep, not ours."""
    async with AsyncExitStack() as stack:
        with trio.move_on_after(float("inf") if deadline is None else deadline):
            method = HealthStub(channel).Watch
            changes = await stack.enter_async_context(channel.stream(method, HealthCheckRequest(service=service)))
        yield _Statuses(changes)


class _Statuses:
    def __init__(self, changes: Any) -> None:
        self._changes = changes

    def __aiter__(self) -> _Statuses:
        return self

    async def __anext__(self) -> int:
        return (await anext(self._changes)).status

    async def rest(self) -> list[int]:
        return [status async for status in self]


async def failure(awaitable: Any) -> StatusCode:
    """The status that ``awaitable`` fails with; AssertionError if it does not."""
    try:
        await awaitable
    except RpcError as error:
        return error.code
    raise AssertionError("the call did not fail")
