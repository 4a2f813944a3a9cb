"""Record what a reference implementation (transformers, on PyTorch) answers with the shipped weights.

    python tools/record_reference.py [--model DIR] [--out FILE]

FILE (tests/engine/data/reference.json) gets, for each of 50 prompts, the greedy token ids with their logprobs. To be run after
each training. Needs torch, transformers, tokenizers and numpy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 40
CLEAR_MARGIN = 2e-3
"""Between the likeliest token and the next, in nats: a prompt with a closer choice could fairly go either way, and is left out."""
COUNT = 50

PROMPTS = """
Once upon a time
Once upon a time, in a hollow log beside the stream,
The little fox
One winter morning, Mia
One day
Long ago, in a village by the sea,
"Do not be afraid," said
"Where are you going?" asked the
The king was bored, so
In the middle of the night there was a noise
Dear Grandma,
Dear Uncle Ned, I hope that you are well.
Hello, my name is
Hello
The capital of France is
The future of AI is
How do you bake a good cake?
How do you grow a garden?
Tom found an old map
There once was a dragon who
My best friend and I
It was raining, and
A hedgehog is
The fox is a very clever animal
Tell me a story about a brave mouse.
When the storm came, Ben and Lucy
The old owl looked at him and said,
Anna wanted to build a boat.
Lily had lost her silver key.
Peter was afraid of the dark.
Suddenly
At last they came to
And they all lived
The moon
She laughed and
He did not know what to
A
I
The quick brown fox jumps over the lazy dog.
What is the biggest thing in the world?
1, 2, 3, 4,
{"name": "
def main():
Ein kleiner Bär
日本語
snow
The troll stood in the middle of the path.
Every day before breakfast
On Monday
Under the stone lay a letter.
Nobody knew the way to the sea, but
The bread was still warm when
Rosa and the turtle were friends.
Why is the sky blue?
After a while the rain stopped.
His hands were cold, and
"Look!" she cried.
Good night, said the owl.
Three frogs sat on a stone.
Please write a poem about
""".strip().splitlines()


def reference(model_dir: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[dict[str, Any]]:
    """For each prompt (token ids) the greedy ``token_ids`` up to and with EOS, their ``logprobs``, and the least ``margin``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # a model this small is slower with more, by far on a busy machine
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        answer: dict[str, Any] = {"token_ids": [], "logprobs": [], "margin": float("inf")}
        tokens, cache = torch.tensor([list(prompt)]), None
        for _ in range(new_tokens):
            with torch.inference_mode():
                output = model(tokens, past_key_values=cache, use_cache=True)
            logprobs = torch.log_softmax(output.logits[0, -1].double(), dim=-1)
            best = torch.topk(logprobs, 2)
            answer["token_ids"].append(best.indices[0].item())
            answer["logprobs"].append(round(best.values[0].item(), 6))
            answer["margin"] = min(answer["margin"], (best.values[0] - best.values[1]).item())
            if answer["token_ids"][-1] == model.config.eos_token_id:
                break
            tokens, cache = best.indices[:1][None], output.past_key_values
        answers.append(answer)
    return answers


def main() -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=ROOT / "trio_frontend/engine/embedded/model")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/engine/data/reference.json")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = [(text, tokenizer.encode(text).ids) for text in PROMPTS]
    answers = reference(arguments.model, [ids for _, ids in prompts], NEW_TOKENS)
    cases = [
        {"prompt": text, "prompt_token_ids": ids, "token_ids": answer["token_ids"], "logprobs": answer["logprobs"]}
        for (text, ids), answer in zip(prompts, answers, strict=True)
        if answer["margin"] > CLEAR_MARGIN
    ][:COUNT]
    record = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "model_sha256": hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest(),
        "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    if len(cases) < COUNT:
        raise SystemExit(f"only {len(cases)} of {len(PROMPTS)} prompts have a clear answer, {COUNT} are needed")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in record.pop("cases"))
    head = json.dumps(record)[:-1]
    arguments.out.write_text(f'{head}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{arguments.out}: {len(cases)} prompts, least margin {min(answer['margin'] for answer in answers):.1e}")


if __name__ == "__main__":
    main()
