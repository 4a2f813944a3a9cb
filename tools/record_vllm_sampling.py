"""Record what a real vLLM engine generates with the shipped weights under every sampling rule that needs no random number.

    python tools/record_vllm_sampling.py [--model DIR] [--out FILE]

FILE (tests/engine/data/vllm_sampling.json) gets, for each combination of parameters and prompt, the token ids, why they ended, and
the logprobs and ranks of generated and prompt tokens. The embedded engine's tests hold it against them. To be run in an
environment with vLLM, after the model was trained anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 24

# Names are those of vLLM's SamplingParams; structured output by kind.
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.2},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": 0.3},
    {"logit_bias": {20: 4.0, 300: -50.0, 13: 2.5}},
    {"allowed_token_ids": [20, 30, 40, 50, 60, 70, 80, 1]},
    {"min_tokens": 12, "stop_token_ids": list(range(3, 30))},
    {"stop_token_ids": list(range(200, 700))},
    {"temperature": 0.9, "top_k": 1, "seed": 3},
    {"temperature": 1.5, "min_p": 1.0, "seed": 1},
    {"temperature": 1.2, "top_p": 0.0001, "seed": 2},
    {"ignore_eos": True},
    {"regex": "[a-z]{5} [0-9]{3}"},
    {"choice": ["alpha", "beta gamma"]},
]
PROMPTS = ["Once upon a time", "The fox and the owl were", '"Look!" said Tom. "Look at the old boat on the water, it has no']


def logprobs(entries: list[Any], own: list[int]) -> list[list[Any]]:
    """Of each token [rank, logprob, {candidate: logprob}], rounded; what is ruled out (-inf) is left out."""
    rows = []
    for entry, token_id in zip(entries, own, strict=True):
        candidates = {str(i): round(info.logprob, 5) for i, info in entry.items() if info.logprob > -1e30}
        rows.append([entry[token_id].rank, round(entry[token_id].logprob, 5), candidates])
    return rows


def main() -> None:
    import vllm
    from tokenizers import Tokenizer
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=ROOT / "trio_frontend/engine/embedded/model")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/engine/data/vllm_sampling.json")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    llm = LLM(str(arguments.model), dtype="float32", enforce_eager=True, structured_outputs_config={"backend": "guidance"})
    cases = []
    for parameters in PARAMETERS:
        plain = {name: value for name, value in parameters.items() if name not in ("regex", "choice")}
        constraint = {name: value for name, value in parameters.items() if name not in plain}
        sampling = SamplingParams(
            **{"temperature": 0.0, **plain},
            max_tokens=NEW_TOKENS,
            logprobs=2,
            prompt_logprobs=1,
            structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
        )
        for answer in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False):
            output, prompt = answer.outputs[0], list(answer.prompt_token_ids)
            cases.append(
                {
                    "parameters": parameters,
                    "prompt_token_ids": prompt,
                    "token_ids": list(output.token_ids),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "logprobs": logprobs(output.logprobs, list(output.token_ids)),
                    "prompt_logprobs": logprobs(answer.prompt_logprobs[1:], prompt[1:]),
                }
            )
    record = {
        "made_with": f"vllm {vllm.__version__}",
        "model_sha256": hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest(),
        "new_tokens": NEW_TOKENS,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(f'{json.dumps(record)[:-1]}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{arguments.out}: {len(cases)} cases")


if __name__ == "__main__":
    main()
