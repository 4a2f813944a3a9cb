"""python -m benchmarks.micro.engine_decode: CPU of the engine client alone, from an engine's message to its requests' sinks and channels.

Microseconds per output, for batches of 1, 64 and 512 requests and for three kinds of messages: the mock engine's (two fields an
output), a real engine's plain ones (eighteen fields and scheduler statistics, as vLLM 0.32 sends them), and with 5 logprobs. ``decode``
is MessagePack alone; ``to a sink`` is what a consumer that keeps up costs; ``to a channel`` a consumer that looks later. Then a
request's way out: encoding its ADD, and a whole scope (ADD, abort) over a real socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import trio
import trio.testing
import zmq

from trio_frontend.engine.base import EngineInfo, EngineRequest, SamplingParams
from trio_frontend.engine.outputs import RequestOutputs
from trio_frontend.engine.vllm import start_engine, wait_started, wire
from trio_frontend.engine.vllm.add_request import encode_add
from trio_frontend.engine.vllm.connection import EngineConnection

STATS = {
    "num_running_reqs": 64,
    "num_waiting_reqs": 0,
    "num_skipped_waiting_reqs": 0,
    "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0},
    "step_counter": 0,
    "current_wave": 0,
    "kv_cache_usage": 0.25,
    "iteration_details": None,
    "prefix_cache_stats": {"reset": False, "requests": 0, "queries": 0, "hits": 0, "hits_by_source": {}},
    "kv_cache_eviction_events": [],
    "spec_decoding_stats": None,
    "waiting_lora_adapters": {},
    "running_lora_adapters": {},
}


def array(values: np.ndarray) -> list[Any]:
    return [values.dtype.str, list(values.shape), msgspec.msgpack.Ext(3, values.tobytes())]


def bare(request_id: str) -> list[Any]:
    return [request_id, [300]]


def real(request_id: str) -> list[Any]:
    return [request_id, [300], *[None] * 11, 0, *[None] * 4]


def with_logprobs(request_id: str) -> list[Any]:
    output = real(request_id)
    ids, logprobs = np.full((1, 6), 300, np.int32), np.full((1, 6), -1.5, np.float32)
    output[2] = [array(ids), array(logprobs), array(np.ones(1, np.int64)), None]
    return output


KINDS: dict[str, tuple[Callable[[str], list[Any]], dict[str, Any] | None]] = {
    "mock": (bare, None),
    "real": (real, STATS),
    "logprobs": (with_logprobs, STATS),
}


def cpu(run: Callable[[], object], seconds: float = 0.3) -> float:
    """Microseconds of CPU that one ``run()`` takes."""
    run()
    times, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        for _ in range(10):
            run()
        times += 10
    return spent / times * 1e6


def messages(kind: str, batch: int) -> tuple[list[str], list[zmq.Frame]]:
    make, stats = KINDS[kind]
    ids = [f"{number:032x}" for number in range(batch)]
    return ids, [zmq.Frame(msgspec.msgpack.encode([0, [make(i) for i in ids], stats, 1.0, None]))]


async def consume(outputs: RequestOutputs) -> None:
    outputs.set_sink(lambda output: True)
    async for _ in outputs:
        pass


async def inbound(life: EngineConnection) -> None:
    print(f"{'us per output':24}" + "".join(f"{name:>16}" for name in ("decode", "to a sink", "to a channel")))
    for kind in KINDS:
        for batch in (1, 64, 512):
            ids, frames = messages(kind, batch)
            decoded = cpu(lambda frames=frames: wire.decode_outputs(frames)) / batch  # type: ignore[misc]
            streams = {i: RequestOutputs(1 << 30) for i in ids}
            life._requests = streams
            async with trio.open_nursery() as nursery:
                for stream in streams.values():
                    nursery.start_soon(consume, stream)
                await trio.testing.wait_all_tasks_blocked()
                sunk = cpu(lambda frames=frames: life._handle(frames)) / batch  # type: ignore[misc]
                nursery.cancel_scope.cancel()
            for stream in streams.values():
                stream.set_sink(None)
            queued = cpu(lambda frames=frames: life._handle(frames)) / batch  # type: ignore[misc]
            life._requests = {}
            row = (decoded, sunk, queued)
            print(f"{f'{kind}, batch of {batch}':24}" + "".join(f"{figure:16.3f}" for figure in row))


def outbound() -> None:
    engine = EngineInfo(max_model_len=40_000)
    print("\nus per request")
    for name, prompt, sampling in (
        ("ADD, 5 tokens", [1, 2, 3, 4, 5], SamplingParams(max_tokens=128)),
        ("ADD, 30,000 tokens", list(range(30_000)), SamplingParams(max_tokens=128)),
        (
            "ADD, many fields",
            [1, 2, 3],
            SamplingParams(128, 1, 0.7, 50, 0.9, 0.1, 7, logit_bias={5: 1.0}, stop_token_ids=[7, 8], eos_token_id=2),
        ),
    ):
        request = EngineRequest("0" * 32, prompt, sampling)
        spent = cpu(lambda request=request: encode_add(request, engine, client_index=0, arrival_time=1.5))  # type: ignore[misc]
        print(f"{name:24}{spent:16.1f}")


async def scopes(engine: Any, count: int = 5000) -> None:
    start = time.process_time()
    for number in range(count):
        async with engine.generate(EngineRequest(str(number), [1, 2, 3, 4, 5], SamplingParams(max_tokens=128))):
            pass
        if number % 64 == 0:
            await trio.lowlevel.checkpoint()
    print(f"{'scope: ADD and abort':24}{(time.process_time() - start) / count * 1e6:16.1f}")


async def join(address: str) -> list[zmq.Socket[bytes]]:
    """The sockets of an engine that has joined, and says and reads nothing more."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handshake, source, sink = context.socket(zmq.DEALER), context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    for socket in (handshake, source, sink):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IDENTITY, b"\0\0")
    handshake.connect(address)
    handshake.send(msgspec.msgpack.encode({"status": "HELLO"}))
    addresses = msgspec.msgpack.decode(await trio.to_thread.run_sync(handshake.recv))["addresses"]
    source.connect(addresses["inputs"][0])
    source.send(msgspec.msgpack.encode({"max_model_len": 40_000}))
    sink.connect(addresses["outputs"][0])
    handshake.send(msgspec.msgpack.encode({"status": "READY"}))
    return [handshake, source, sink]


async def main() -> None:
    async with start_engine(handshake_address="tcp://127.0.0.1:*") as engine:
        sockets = await join(engine.handshake_address)
        await wait_started(engine, 10)
        await inbound(engine._lives[0])
        outbound()
        await scopes(engine)
        for socket in sockets:
            socket.close()


if __name__ == "__main__":
    trio.run(main)
