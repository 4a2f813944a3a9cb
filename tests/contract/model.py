"""python -m tests.contract.model DIRECTORY: the model of the contract's cases as files, for any server and any engine.

The tests' tokenizer, and a Llama of one layer with random weights: what it says is nonsense, and always the same nonsense.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

from tests.services.inference_rig import EOS, VOCAB_SIZE
from tests.text.families import family

__all__ = ["write_model"]


HIDDEN, HEADS, HEAD_SIZE, INNER = 64, 2, 32, 128


def write_model(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    family("byte_level").backend.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    write_weights(directory / "model.safetensors")


def write_weights(path: Path) -> None:
    """The safetensors format: the header's length in 8 bytes, the header as JSON, the tensors."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": (HEADS * HEAD_SIZE, HIDDEN) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
    }
    random = np.random.default_rng(0)
    header: dict[str, object] = {}
    data = b""
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.normal(0.0, 0.1, shape)
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
