"""What the inference tests share: a model without a file, a call that keeps what it is sent, a service over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.text.families import family
from trio_frontend.config import ServerConfig
from trio_frontend.engine.base import Capabilities, EngineInfo, EngineOutput
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.inference import InferenceService
from trio_frontend.services.lora import LoraRegistry
from trio_frontend.services.registry import RequestRegistry
from trio_frontend.testing.engine import Script, ScriptedEngine
from trio_frontend.text import ModelFiles

EOS = 1
VOCAB_SIZE = 512


def model(name: str = "byte_level", **fields: Any) -> ModelFiles:
    return ModelFiles(
        **({"name": "tiny", "tokenizer": family(name), "vocab_size": VOCAB_SIZE, "eos_token_id": EOS} | fields)
    )


def byte_ids(text: str | bytes) -> list[int]:
    """The byte-level family's tokens of single bytes."""
    data = text.encode() if isinstance(text, str) else text
    by_byte = {}
    pieces = family("byte_level").pieces(skip_special_tokens=True)
    for token_id in range(family("byte_level").vocab_size):
        piece = pieces[token_id]
        raw = piece.encode() if isinstance(piece, str) else piece
        if raw is not None and len(raw) == 1:
            by_byte.setdefault(raw[0], token_id)
    return [by_byte[byte] for byte in data]


@dataclass
class FakeCall:
    """A call that takes everything. ``fast`` says, message by message, whether the fast path may send; then always."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    fast: Iterator[bool] = field(default_factory=lambda: iter(()))
    sent: list[bytes] = field(default_factory=list)
    sent_fast: int = 0
    pace: float = 0.0

    async def send_bytes(self, serialized: bytes) -> None:
        await trio.sleep(self.pace)
        self.sent.append(serialized)

    def try_send_bytes(self, serialized: bytes) -> bool:
        if next(self.fast, True):
            self.sent.append(serialized)
            self.sent_fast += 1
            return True
        return False

    @property
    def messages(self) -> list[pb.GenerateResponse]:
        return [pb.GenerateResponse.FromString(message) for message in self.sent]


@dataclass
class Asked:
    """A call that is expected to fail, in a task of the test's nursery: ``error`` is what it failed with."""

    error: Exception | None = None

    async def run(self, ask: Callable[..., Any], *args: Any) -> None:
        try:
            await ask(*args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error


@dataclass
class Rig:
    engine: ScriptedEngine
    service: InferenceService
    registry: RequestRegistry
    loras: LoraRegistry

    async def unary(self, request: pb.GenerateRequest, metadata: Mapping[str, Any] | None = None) -> pb.GenerateResponse:
        return await self.service.generate(request, FakeCall(metadata or {}))

    async def stream(self, request: pb.GenerateRequest, call: FakeCall | None = None) -> list[pb.GenerateResponse]:
        call = call if call is not None else FakeCall()
        await self.service.generate_stream(request, call)
        return call.messages


def make_rig(
    *, config: ServerConfig | None = None, files: ModelFiles | None = None, capabilities: Capabilities | None = None
) -> Rig:
    if capabilities is None:
        capabilities = Capabilities(max_model_len=64, engines=(EngineInfo(max_model_len=64),))
    engine = ScriptedEngine(capabilities=capabilities)
    registry, loras = RequestRegistry(), LoraRegistry()
    service = InferenceService(
        engine,
        files if files is not None else model(),
        config if config is not None else ServerConfig(served_model_names=("tiny", "alias")),
        registry,
        loras,
    )
    return Rig(engine, service, registry, loras)


@asynccontextmanager
async def playing(rig: Rig, script: Script, pace: float = 0.0) -> Any:
    async with trio.open_nursery() as nursery:
        await nursery.start(rig.engine.play, script, pace)
        yield rig
        nursery.cancel_scope.cancel()


def request(prompt: str | Sequence[int] = (300, 301), max_new_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    """A request that wants its token ids; ``stopping``, ``response`` and the rest are dicts."""
    message = pb.GenerateRequest(
        stopping={"max_new_tokens": max_new_tokens} | fields.pop("stopping", {}),
        response={"output_token_ids": True} | fields.pop("response", {}),
        **fields,
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


def joined(messages: Sequence[pb.GenerateResponse], index: int = 0) -> pb.SequenceOutput:
    """What a client has of one sequence at the end."""
    whole = pb.SequenceOutput(index=index)
    for message in messages:
        output = message.outputs
        if not message.HasField("outputs") or output.index != index:
            continue
        whole.text += output.text
        whole.num_tokens += output.num_tokens
        whole.token_ids.extend(output.token_ids)
        whole.logprobs.extend(output.logprobs)
        whole.ranks.extend(output.ranks)
        whole.candidate_tokens.extend(output.candidate_tokens)
        if output.HasField("finish_info"):
            assert not whole.HasField("finish_info")
            whole.finish_info.CopyFrom(output.finish_info)
    return whole


def steps(*outputs: EngineOutput) -> Callable[[Any], list[EngineOutput]]:
    return lambda request: list(outputs)
