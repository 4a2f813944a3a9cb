"""Sample the shipped model, and count which of its words occur in the text it was trained on.

    python tools/sample_model.py [--model DIR] [--words FILE] [--temperature T] [--tokens N] [--seed N] [--markdown N]

Drives ONNX Runtime directly, all prompts in one batch. With --markdown it prints the first N samples as docs/model.md shows
them. Needs onnxruntime, tokenizers and numpy.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "trio_frontend/engine/embedded/model"
WORDS = ROOT / "tests/engine/data/words.txt"

PROMPTS = (
    "Once upon a time",
    "The little fox",
    "One winter morning, Mia",
    "Long ago, in a village by the sea,",
    '"Do not be afraid," said',
    "The king was bored, so",
    "In the middle of the night there was a noise",
    "Dear Grandma,",
    "Hello, my name is",
    "The capital of France is",
    "How do you bake a good cake?",
    "Tom found an old map",
    "There once was a dragon who",
    "My best friend and I",
    "It was raining, and",
    "A hedgehog is",
    "Tell me a story about a brave mouse.",
    "When the storm came, Ben and Lucy",
    "The old owl looked at him and said,",
    "Anna wanted to build a boat.",
)
"""Half of them begin as the training text might; the others do not."""


class Decoder:
    """The exported decoder under ONNX Runtime, with prompts of different lengths padded on the left."""

    def __init__(self, model: Path, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])
        config = json.loads((model / "config.json").read_text())
        self.eos: int = config["eos_token_id"]
        self._cache_shape = (config["num_key_value_heads"], 0, config["head_dim"])
        self._pasts = [node.name for node in self._session.get_inputs() if node.name.startswith("past_key_values.")]
        self._outputs = ["logits", *(name.replace("past_key_values", "present") for name in self._pasts)]

    def generate(
        self, prompts: Sequence[Sequence[int]], most_tokens: int, pick: Callable[[int, np.ndarray], int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and logprobs after each prompt, up to and with EOS; ``pick(row, logprobs [vocab])`` chooses a token."""
        width = max(map(len, prompts))
        tokens = np.zeros((len(prompts), width), np.int64)
        mask = np.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        caches: list[Any] = [np.zeros((len(prompts), *self._cache_shape), np.float32)] * len(self._pasts)
        ids: list[list[int]] = [[] for _ in prompts]
        values: list[list[float]] = [[] for _ in prompts]
        live = set(range(len(prompts)))
        for _ in range(most_tokens):
            feeds = dict(zip(self._pasts, caches, strict=True))
            feeds |= {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
            logits, *caches = self._session.run(self._outputs, feeds)
            logprobs = log_softmax(logits[:, -1])
            tokens = np.full((len(prompts), 1), self.eos, np.int64)
            for row in sorted(live):
                token = tokens[row, 0] = pick(row, logprobs[row])
                ids[row].append(int(token))
                values[row].append(float(logprobs[row, token]))
                if token == self.eos:
                    live.remove(row)
            if not live:
                break
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
            positions = positions[:, -1:] + 1
        return ids, values


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def sampler(seed: int, temperature: float) -> Callable[[int, np.ndarray], int]:
    """Picks by temperature alone; each row has a generator of its own."""
    generators: dict[int, np.random.Generator] = {}

    def pick(row: int, logprobs: np.ndarray) -> int:
        generator = generators.setdefault(row, np.random.default_rng((seed, row)))
        weights = np.exp(log_softmax(logprobs / temperature))
        return int(generator.choice(len(weights), p=weights / weights.sum()))

    return pick


def words(text: str) -> list[str]:
    """The words of a text in lower case, as tools/stories.py counts them."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def continuations(model: Path, temperature: float, most_tokens: int, seed: int) -> list[tuple[str, str, bool]]:
    """(prompt, text, whether the story came to its end) for each of PROMPTS."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    decoder = Decoder(model)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    ids, _ = decoder.generate(prompts, most_tokens, sampler(seed, temperature))
    return [
        (prompt, tokenizer.decode(row, skip_special_tokens=True), row[-1] == decoder.eos)
        for prompt, row in zip(PROMPTS, ids, strict=True)
    ]


def known_share(texts: Sequence[str], vocabulary: set[str]) -> float:
    """The share of the texts' words that occur in ``vocabulary``. A word cut short by the end of a text counts as well."""
    found = [word for text in texts for word in words(text)]
    return sum(word in vocabulary for word in found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--words", type=Path, default=WORDS)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", type=int, default=0)
    arguments = parser.parse_args()
    samples = continuations(arguments.model, arguments.temperature, arguments.tokens, arguments.seed)
    if arguments.markdown:
        for prompt, text, _ in samples[: arguments.markdown]:
            body = "\n".join(f"> {line}".rstrip() for line in f"**{prompt}**{text}".splitlines())
            print(body, end="\n\n")
        return
    vocabulary = set(arguments.words.read_text().split())
    for prompt, text, ended in samples:
        print(f"[{prompt}]{text}{' </s>' if ended else ' ...'}\n\n---")
    unknown = sorted({word for _, text, _ in samples for word in words(text)} - vocabulary)
    print(f"{known_share([text for _, text, _ in samples], vocabulary):.2%} of the words are known; unknown: {unknown}")


if __name__ == "__main__":
    main()
