"""Train the small model that the package ships, and write its directory.

    python tools/train_model.py [--out DIR] [--words FILE] [--seed N] [--stories N] [--steps N] [--threads N]

The text comes from tools/stories.py. DIR (by default trio_frontend/engine/embedded/model) gets a byte-level BPE tokenizer, the
weights and configuration as a Hugging Face directory, and over the same weights the graph for ONNX Runtime (see
export_onnx.py); FILE (tests/engine/data/words.txt) gets every word that occurs in the text. About half an hour on one core.
Needs torch, tokenizers, safetensors, numpy and onnx. Two runs agree closely, not to the bit: BPE dropout takes no seed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from export_onnx import export
from llama import Llama, LlamaConfig
from safetensors.torch import save_file
from stories import stories, words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
HELD_OUT_SEED = 1_000_003
HELD_OUT_STORIES = 200
TOKENS_PER_STEP = 4096
SEQUENCE = 256
LONG_SEQUENCE = 1024
LONG_EVERY = 4
"""Every fourth step sees sequences of the full length of the context."""
PIECES_PART = 0.1
PIECES_DROPOUT = 0.1
"""In this part of the stories one merge in ten is left out, so that the model knows words that a prompt spells in pieces."""
MATRIX_RATE = 5e-3
OTHER_RATE = 5e-3
WARMUP_STEPS = 50


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Corpus:
    """All stories one after the other, each ``<s> ... </s>``; a batch is cut out at random, half of it at story beginnings."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], pieces_part: float) -> None:
        in_pieces = Tokenizer.from_str(tokenizer.to_str())
        in_pieces.model.dropout = PIECES_DROPOUT
        border = int(len(texts) * pieces_part)
        encodings = in_pieces.encode_batch(texts[:border]) + tokenizer.encode_batch(texts[border:])
        order = np.random.default_rng(0).permutation(len(texts))
        rows = [np.array([*encodings[i].ids, EOS], dtype=np.int64) for i in order]
        self.tokens = np.concatenate(rows)
        self.starts = np.cumsum([0, *(len(row) for row in rows[:-1])])

    def batch(self, rng: np.random.Generator, size: int, length: int) -> torch.Tensor:
        """int64 [size, length + 1]."""
        last = len(self.tokens) - length - 1
        starts = self.starts[: np.searchsorted(self.starts, last)]
        at = np.concatenate([rng.choice(starts, size // 2), rng.integers(0, last, size - size // 2)])
        return torch.from_numpy(self.tokens[at[:, None] + np.arange(length + 1)])


def loss_of(model: Llama, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(model: Llama, corpus: Corpus, held_out: Corpus, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Muon for the matrices between the layers, AdamW for the embedding and the norms
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.dim() == 2 and "embed" not in name]
    others = [parameter for name, parameter in model.named_parameters() if parameter.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, decay)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    began = time.monotonic()
    for step in range(steps):
        length = LONG_SEQUENCE if step % LONG_EVERY == 0 else SEQUENCE
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, corpus.batch(rng, TOKENS_PER_STEP // length, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 == 49 or step == steps - 1:
            seconds = time.monotonic() - began
            print(
                f"step {step + 1}/{steps}: loss {loss.item():.3f}, held out {evaluate(model, held_out):.3f}, "
                f"{(step + 1) * TOKENS_PER_STEP / seconds:.0f} tokens/s, {seconds:.0f} s",
                flush=True,
            )


@torch.inference_mode()
def evaluate(model: Llama, held_out: Corpus) -> float:
    """Mean loss in nats per token on stories of another seed."""
    rng = np.random.default_rng(0)
    return float(np.mean([loss_of(model, held_out.batch(rng, 4, LONG_SEQUENCE)).item() for _ in range(2)]))


def write_directory(out: Path, model: Llama, tokenizer: Tokenizer, config: LlamaConfig) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    files = {
        "config.json": config.as_hugging_face(BOS, EOS, PAD),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer_config.json": {
            **tokens,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    export(out, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "trio_frontend/engine/embedded/model")
    parser.add_argument("--words", type=Path, default=ROOT / "tests/engine/data/words.txt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stories", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)

    texts = list(stories(arguments.seed, arguments.stories))
    vocabulary = sorted({word for text in texts for word in words(text)})
    tokenizer = train_tokenizer(texts, LlamaConfig.vocab_size)
    corpus = Corpus(tokenizer, texts, PIECES_PART)
    held_out = Corpus(tokenizer, list(stories(HELD_OUT_SEED, HELD_OUT_STORIES)), 0.0)
    config = replace(LlamaConfig(), vocab_size=tokenizer.get_vocab_size())
    model = Llama(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(texts)} stories, {len(corpus.tokens)} tokens, {len(vocabulary)} words, {parameters} parameters", flush=True)
    train(model, corpus, held_out, arguments.steps, arguments.seed)
    write_directory(arguments.out, model, tokenizer, config)
    arguments.words.parent.mkdir(parents=True, exist_ok=True)
    arguments.words.write_text("\n".join(vocabulary) + "\n")
    print(f"{arguments.out}: {sum(file.stat().st_size for file in arguments.out.iterdir())} bytes")


if __name__ == "__main__":
    main()
