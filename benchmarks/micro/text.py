"""python -m benchmarks.micro.text: CPU of text/ and of the messages made of it, alone: encoding, detokenizing, one GenerateResponse.

Microseconds per call, the best of several rounds. The message of a streamed token is written by hand; protobuf's own is beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.services.inference_rig import model
from trio_frontend.protos.vllm import inference_pb2 as pb
from trio_frontend.services.responses import encode_tokens
from trio_frontend.text import detokenizer

ROUNDS = 20
TOKENS = list(range(300, 440)) * 4
FAMILIES = {
    "byte level": "byte_level",
    "byte fallback": "llama_byte_fallback",
    "metaspace": "metaspace",
    "any other": "word_piece",
}


def best(work: Callable[[], object], count: int) -> float:
    """Microseconds of CPU per unit, of ``count`` units that ``work`` does."""
    taken = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken) / count * 1e6


def detokenized(family: str) -> float:
    step = detokenizer(model(family).tokenizer, [1, 2, 3], skip_special_tokens=True).step

    def work() -> None:
        for token_id in TOKENS:
            step(token_id)

    return best(work, len(TOKENS))


def main() -> None:
    print("us per token, detokenized:")
    for name, family in FAMILIES.items():
        print(f"  {detokenized(family):8.2f}  {name}")
    encode = model().tokenizer.encode
    print("us per text, encoded:")
    for name, text in (("10 characters", "import os\n"), ("2,000 characters", "the cat sat on the mat. " * 83)):
        print(f"  {best(lambda text=text: [encode(text) for _ in range(20)], 20):8.2f}  {name}")  # type: ignore[misc]
    print("us per message of one token:")
    by_hand = best(lambda: [encode_tokens(0, " mat", 1, (300,)) for _ in range(500)], 500)
    print(f"  {by_hand:8.2f}  written by hand")
    by_protobuf = best(lambda: [response(" mat", 300) for _ in range(500)], 500)
    print(f"  {by_protobuf:8.2f}  by protobuf")


def response(text: str, token_id: int) -> bytes:
    message = pb.GenerateResponse(outputs=pb.SequenceOutput(text=text, num_tokens=1))
    message.outputs.token_ids.append(token_id)
    return message.SerializeToString()


if __name__ == "__main__":
    main()
