"""Make a small random LoRA adapter for a Hugging Face Llama directory, in PEFT's layout: for tests, it has learned nothing.

    python tools/make_lora.py MODEL_DIR OUT_DIR [--rank N] [--seed N] [--strength X]

OUT_DIR gets adapter_config.json and adapter_model.safetensors, with q_proj and v_proj of every layer changed enough that greedy
text differs from the model's own. Needs safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def make_adapter(model_dir: Path, out_dir: Path, rank: int = 2, seed: int = 1, strength: float = 1.0) -> None:
    """Write the adapter. ``strength`` is about how large the change of a projection is beside its input of unit size."""
    config = json.loads((model_dir / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head_dim, "v_proj": (config.get("num_key_value_heads") or heads) * head_dim}
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            down = rng.normal(0.0, hidden**-0.5, (rank, hidden))
            up = rng.normal(0.0, strength * rank**-0.5, (width, rank))
            tensors[f"{name}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = up.astype(np.float32)
    adapter = {
        "base_model_name_or_path": model_dir.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(widths),
        "task_type": "CAUSAL_LM",
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
    save_file(tensors, out_dir / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strength", type=float, default=1.0)
    arguments = parser.parse_args()
    make_adapter(arguments.model_dir, arguments.out_dir, arguments.rank, arguments.seed, arguments.strength)


if __name__ == "__main__":
    main()
