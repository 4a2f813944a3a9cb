"""Record what a real vLLM engine core says: python -m tests.engine.vllm.record PORT, beside a headless engine on that port.

    vllm serve MODEL --headless --data-parallel-address 127.0.0.1 --data-parallel-rpc-port PORT --data-parallel-size-local 1

Plays a frontend with bare pyzmq: it does the handshake, sends a few requests and calls, and writes every message that comes, frame
by frame, to recorded/NAME.bin (a MessagePack array of messages, each an array of binary frames). The tests read them back, so that
they need no vLLM. Run it again for a new release; the model must have at least 40 token ids.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from trio_frontend.engine.base import EngineInfo, EngineRequest, SamplingParams, StructuredOutput
from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.add_request import encode_add

RECORDED = pathlib.Path(__file__).parent / "recorded"
Messages = list[list[bytes]]


def read(name: str) -> Messages:
    """The messages of recorded/NAME.bin."""
    return msgspec.msgpack.decode((RECORDED / f"{name}.bin").read_bytes(), type=list[list[bytes]])


def write(name: str, messages: Messages) -> None:
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.bin").write_bytes(msgspec.msgpack.encode(messages))
    print(f"{name}: {len(messages)} messages, frames {sorted({len(frames) for frames in messages})}")


def is_last(message: Any) -> bool:
    """A request ends in this message."""
    return any(len(output) > 5 and output[5] is not None for output in message[1])


class Recorder:
    def __init__(self, port: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshake = context.socket(zmq.ROUTER)
        self.handshake.bind(f"tcp://127.0.0.1:{port}")
        self.input = context.socket(zmq.ROUTER)
        self.output = context.socket(zmq.PULL)
        self.addresses = [f"tcp://127.0.0.1:{s.bind_to_random_port('tcp://127.0.0.1')}" for s in (self.input, self.output)]
        self.identity = b""

    def join(self) -> None:
        hello = self.handshake.recv_multipart()
        self.identity = hello[0]
        self.handshake.send_multipart([self.identity, wire.encode_init(self.addresses[:1], self.addresses[1:])])
        ready_response = self.input.recv_multipart()
        self.max_model_len = msgspec.msgpack.decode(ready_response[1])["max_model_len"]
        ready = self.handshake.recv_multipart()
        write("handshake", [hello, ready_response, ready])

    def add(self, request_id: str, sampling: SamplingParams, prompt: list[int] | None = None) -> None:
        request = EngineRequest(request_id, prompt if prompt is not None else [1, 2, 3], sampling)
        self.send(wire.ADD, encode_add(request, EngineInfo(max_model_len=2**31), client_index=0, arrival_time=time.time()))

    def send(self, kind: bytes, body: bytes) -> None:
        self.input.send_multipart([self.identity, kind, body])

    def receive_until(self, done: Callable[[Any], bool], timeout: float = 60.0, accept: bytes | None = None) -> Messages:
        """Messages up to one that is ``done``, or is the single frame ``accept``."""
        messages: Messages = []
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.output.poll(200):
                messages.append(self.output.recv_multipart())
                if messages[-1] == [accept]:
                    return messages
                if done(msgspec.msgpack.decode(messages[-1][0], ext_hook=lambda code, data: bytes(data))):
                    return messages
        raise SystemExit(f"not seen within {timeout} s; {len(messages)} messages came")

    def record(self, name: str, sampling: SamplingParams, prompt: list[int] | None = None) -> None:
        self.add(name, sampling, prompt)
        write(name, self.receive_until(is_last))

    def utility(self, name: str, *call: Any) -> None:
        self.send(wire.UTILITY, msgspec.msgpack.encode([0, 1, *call]))
        write(name, self.receive_until(lambda message: len(message) > 4 and message[4] is not None))


def main() -> None:
    recorder = Recorder(int(sys.argv[1]))
    recorder.join()
    recorder.record("plain", SamplingParams(max_tokens=5, ignore_eos=True))
    recorder.record("logprobs", SamplingParams(max_tokens=3, logprobs=3, ignore_eos=True))
    # Arrays of 256 bytes or more leave the body for frames of their own.
    recorder.record("large_logprobs", SamplingParams(max_tokens=2, logprobs=20, ignore_eos=True), list(range(1, 10)))
    recorder.record("prompt_logprobs", SamplingParams(max_tokens=1, prompt_logprobs=4, ignore_eos=True), list(range(1, 41)))
    recorder.record("stop_token", SamplingParams(max_tokens=50, temperature=2.0, seed=1, stop_token_ids=range(1000)))
    recorder.utility("utility", "is_sleeping", [])
    recorder.utility("utility_map", "collective_rpc", ["no_such_method", None, [], {}])
    recorder.utility("utility_unknown", "no_such_method", [])
    choice = StructuredOutput("choice", ("yes", "no"))
    recorder.record("structured", SamplingParams(max_tokens=5, structured_output=choice, eos_token_id=0))
    # The backend of the first is the engine's for good, and xgrammar on 0.32 has no choice: ERROR.
    recorder.record("error", SamplingParams(max_tokens=5, structured_output=replace(choice, backend="guidance")))
    recorder.add("aborted", SamplingParams(max_tokens=900, ignore_eos=True))
    recorder.receive_until(lambda message: bool(message[1]))
    recorder.send(wire.UTILITY, msgspec.msgpack.encode([0, 2, "pause_scheduler", ["abort", False]]))
    write("abort", recorder.receive_until(is_last)[-3:])
    recorder.send(wire.UTILITY, msgspec.msgpack.encode([0, 3, "resume_scheduler", []]))
    # Last, because the engine dies of it: a prompt that leaves no room for a token.
    recorder.add("deadly", SamplingParams(max_tokens=1), [1] * recorder.max_model_len)
    write("dead", recorder.receive_until(lambda message: False, accept=wire.ENGINE_CORE_DEAD)[-1:])


if __name__ == "__main__":
    main()
