"""A fake engine core on real ZeroMQ sockets, every move of which is the test's.

It speaks the engine's side of the protocol message by message (``hello``, ``receive_init``, ``send_ready_response``, ...), so that a
test can leave a step out, repeat it or get it wrong; ``join`` takes them all in order. Bodies are plain lists and maps, encoded
here without the structs of the code under test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
import zmq

from trio_frontend.engine.base import EngineRequest, SamplingParams
from trio_frontend.engine.vllm import VllmEngine, VllmOptions, start_engine, wait_started

PATIENCE = 5.0
"""Seconds after which a test has failed rather than waits."""

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3

READY_RESPONSE = {
    "max_model_len": 2048,
    "num_gpu_blocks": 512,
    "block_size": 16,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "instance_id": "scripted",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "supports_lora": False,
    "max_loras": 0,
    "a_key_of_a_later_release": {"and": ["its", "value"]},
}


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def decode(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def request(request_id: str = "r", max_tokens: int = 16, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens), **fields)


async def until(condition: Callable[[], Any]) -> None:
    """Return once ``condition()`` is true; the test fails if it does not become so."""
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


async def heard(engine: VllmEngine, *cores: ScriptedCore) -> None:
    """Return once everything that ``cores`` (all of the engine's) have sent so far was taken in: the answer to a call comes last."""

    async def answer(core: ScriptedCore) -> None:
        core.answer((await core.receive_utility())[1])

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for core in cores:
                nursery.start_soon(answer, core)
            await engine.call_utility("heard")


class ScriptedCore:
    """One engine core. ``rank`` may be bytes, for an identity that is none."""

    def __init__(self, handshake_address: str, rank: int | bytes = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshake_address = handshake_address
        self.identity = rank if isinstance(rank, bytes) else rank.to_bytes(2, "little")
        self.rank = rank if isinstance(rank, int) else 0
        self.sockets: list[zmq.Socket[bytes]] = []
        self.handshake: zmq.Socket[bytes] | None = None
        self.inputs: list[zmq.Socket[bytes]] = []
        self.outputs: list[zmq.Socket[bytes]] = []
        self.addresses: dict[str, Any] = {}
        self.receive_hwm = 1000

    # The handshake, step by step.

    def connect(self) -> None:
        self.handshake = self._socket(zmq.DEALER, self.handshake_address)

    def send_handshake(self, *frames: bytes) -> None:
        assert self.handshake is not None
        self.handshake.send_multipart(frames)

    def hello(self) -> None:
        if self.handshake is None:
            self.connect()
        self.send_handshake(encode({"status": "HELLO", "local": False, "headless": True}))

    async def receive_init(self) -> None:
        assert self.handshake is not None
        self.addresses = decode((await self._receive(self.handshake))[0])["addresses"]

    def connect_inputs(self) -> None:
        self.inputs = [self._socket(zmq.DEALER, address) for address in self.addresses["inputs"]]

    def send_ready_response(self, **fields: Any) -> None:
        for socket in self.inputs:
            socket.send(encode({**READY_RESPONSE, **fields}))

    def connect_outputs(self) -> None:
        self.outputs = [self._socket(zmq.PUSH, address) for address in self.addresses["outputs"]]

    def ready(self) -> None:
        self.send_handshake(encode({"status": "READY", "local": False, "headless": True}))

    async def join(self, **fields: Any) -> None:
        """Every step, in the order of a real engine. ``fields`` are of the ready response."""
        self.hello()
        await self.receive_init()
        self.connect_inputs()
        self.send_ready_response(**fields)
        self.connect_outputs()
        self.ready()

    # Afterwards.

    async def receive(self) -> tuple[bytes, Any]:
        """The next message on the first input: its type and its decoded body."""
        kind, body = await self._receive(self.inputs[0])
        return kind, decode(body)

    async def receive_add(self) -> list[Any]:
        kind, body = await self.receive()
        assert kind == b"\x00", f"{kind!r} {body} came instead of an ADD"
        return list(body)

    async def receive_abort(self) -> list[str]:
        kind, body = await self.receive()
        assert kind == b"\x01", f"{kind!r} {body} came instead of an ABORT"
        return list(body)

    async def receive_utility(self) -> list[Any]:
        kind, body = await self.receive()
        assert kind == b"\x03", f"{kind!r} {body} came instead of a UTILITY call"
        return list(body)

    def send(self, *outputs: Sequence[Any], stats: dict[str, Any] | None = None, utility: Any = None) -> None:
        """One step's message. An output is [request_id, [token ids], ...] as on the wire."""
        self.send_frames(self.encoded(*outputs, stats=stats, utility=utility))

    def encoded(self, *outputs: Sequence[Any], stats: dict[str, Any] | None = None, utility: Any = None) -> bytes:
        return encode([self.rank, outputs, stats, 1.0, utility])

    def send_frames(self, *frames: bytes) -> None:
        self.outputs[0].send_multipart(frames)

    def finish(self, request_id: str, token_ids: Sequence[int] = (), reason: int = LENGTH) -> None:
        self.send([request_id, token_ids, None, None, None, reason])

    def answer(self, call_id: int, result: Any = None, failure: str | None = None) -> None:
        self.send(utility=[call_id, failure, None if failure else [None, result]])

    def die(self) -> None:
        """As kill -9 does it: every connection is closed without a word. What was sent before still arrives."""
        for socket in self.sockets:
            socket.close(linger=200)
        self.sockets.clear()

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.receive_hwm)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.connect(address)
        self.sockets.append(socket)
        return socket

    @staticmethod
    async def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    return socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    await trio.lowlevel.wait_readable(socket.fileno())


@asynccontextmanager
async def scripted_core(engine: VllmEngine, rank: int | bytes = 0) -> AsyncIterator[ScriptedCore]:
    """A core for ``engine`` that has done nothing yet."""
    core = ScriptedCore(engine.handshake_address, rank)
    try:
        yield core
    finally:
        core.close()


@asynccontextmanager
async def engine_with_core(**options: Any) -> AsyncIterator[tuple[VllmEngine, ScriptedCore]]:
    """An open engine of one scripted core that has joined."""
    async with starting_engine(**options) as engine, scripted_core(engine) as core:
        await core.join()
        await wait_started(engine, PATIENCE)
        yield engine, core


@asynccontextmanager
async def starting_engine(**options: Any) -> AsyncIterator[VllmEngine]:
    """An engine that waits for its cores, at a port of the system's choice."""
    async with start_engine(handshake_address="tcp://127.0.0.1:*", options=VllmOptions(**options)) as engine:
        yield engine
