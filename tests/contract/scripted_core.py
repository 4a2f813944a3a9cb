"""python -m tests.contract.scripted_core: a vLLM engine core that answers with the scripts of the contract's cases.

    --handshake tcp://HOST:PORT            joins a frontend as ``vllm serve --headless`` does
    --input ADDRESS --output ADDRESS       joins sockets that a launcher has bound

Speaks the protocol of vLLM 0.32 and 0.33 (``vllm/v1/engine``). Needs pyzmq, msgspec and ``script``, and nothing of trio_frontend.
"""

from __future__ import annotations

import argparse
import struct
import time
from typing import Any

import msgspec
import zmq

from tests.contract.script import FINISH, steps_of

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def array(dtype: str, letter: str, shape: list[int], values: list[Any]) -> list[Any]:
    return [dtype, shape, msgspec.msgpack.Ext(3, struct.pack(f"<{len(values)}{letter}", *values))]


def logprobs(rows: list[Any] | None, tensors: bool) -> list[Any] | None:
    """Rows of [ids, values, rank] as numpy arrays (of sampled tokens) or torch tensors (of prompt tokens)."""
    if rows is None:
        return None
    shape = [len(rows), len(rows[0][0]) if rows else 1]
    kinds = ("int32", "float32", "int32") if tensors else ("<i4", "<f4", "<i4")
    return [
        array(kinds[0], "i", shape, [int(token) for ids, _, _ in rows for token in ids]),
        array(kinds[1], "f", shape, [value for _, values, _ in rows for value in values]),
        array(kinds[2], "i", shape[:1], [int(rank) for _, _, rank in rows]),
        None,
    ]


def output(request_id: str, step: dict[str, Any]) -> list[Any]:
    return [
        request_id,
        [int(token) for token in step.get("ids", [])],
        logprobs(step.get("logprobs"), False),
        logprobs(step.get("prompt_logprobs"), True),
        None,
        FINISH[step["finish"]] if "finish" in step else None,
        step.get("stop_reason"),
        None,
        step.get("kv"),
        step.get("ec"),
    ]


class Core:
    def __init__(self, max_model_len: int, vocab_size: int) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.outputs: list[zmq.Socket[bytes]] = []

    def join(self, inputs: list[str], outputs: list[str]) -> None:
        for address in inputs:
            socket = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
            socket.connect(address)
            socket.send(encode(self.ready()))
            self.poller.register(socket, zmq.POLLIN)
        for address in outputs:
            push = self.context.socket(zmq.PUSH)
            push.connect(address)
            self.outputs.append(push)

    def ready(self) -> dict[str, Any]:
        sizes = dict.fromkeys(("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), 1)
        return sizes | {
            "max_model_len": self.max_model_len,
            "num_gpu_blocks": 4096,
            "block_size": 16,
            "dtype": "float32",
            "vllm_version": "0.32.0",
            "decode_context_parallel_size": 1,
            "data_parallel_rank": 0,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "instance_id": "scripted",
            "supports_lora": False,
            "max_loras": 0,
            "kv_events_config": None,
            "weight_transfer_backend": None,
            "enable_sleep_mode": False,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": 16,
            "dp_stats_address": None,
            "mamba_block_size": None,
            "kv_cache_size_tokens": 65536,
            "kv_cache_max_concurrency": 64.0,
        }

    def shake_hands(self, address: str) -> None:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
        socket.connect(address)
        socket.send(encode({"status": "HELLO", "local": True, "headless": True}))
        addresses = decode(socket.recv())["addresses"]
        self.join(addresses["inputs"], addresses["outputs"])
        socket.send(encode({"status": "READY", "local": True, "headless": True, "parallel_config_hash": None}))

    def serve(self) -> None:
        while True:
            for socket, _ in self.poller.poll():
                kind, body = socket.recv_multipart()[:2]
                if kind == b"\x00":
                    self.answer(decode(body))
                elif kind == b"\x03":
                    client, call_id, _, _ = decode(body)
                    self.send(client, [0, [], None, time.monotonic(), [call_id, None, [None, None]]])

    def answer(self, request: list[Any]) -> None:
        """The whole script at once: everything has come before the client has read its first message."""
        client = request[11] if len(request) > 11 and request[11] else 0
        for step in steps_of(len(request[1]), request[3], self.vocab_size):
            self.send(client, [0, [output(request[0], step)], None, time.monotonic()])

    def send(self, client: int, message: list[Any]) -> None:
        self.outputs[client if client < len(self.outputs) else 0].send(encode(message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handshake", metavar="ADDRESS")
    parser.add_argument("--input", metavar="ADDRESS", action="append", default=[])
    parser.add_argument("--output", metavar="ADDRESS", action="append", default=[])
    parser.add_argument("--max-model-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=512)
    args, _ = parser.parse_known_args()
    core = Core(args.max_model_len, args.vocab_size)
    if args.handshake:
        core.shake_hands(args.handshake)
    else:
        core.join(args.input, args.output)
    core.serve()


if __name__ == "__main__":
    main()
