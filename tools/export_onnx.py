"""Export a Hugging Face Llama directory (config.json, *.safetensors) as an ONNX decoder with a KV cache.

    python tools/export_onnx.py MODEL_DIR [OUT_DIR]

Writes OUT_DIR/model.onnx (OUT_DIR defaults to MODEL_DIR) in the layout that exported decoders commonly have:

* inputs ``input_ids`` int64 [batch, sequence], ``attention_mask`` int64 [batch, past + sequence], ``position_ids`` int64
  [batch, sequence], ``past_key_values.<layer>.key`` and ``.value`` float32 [batch, kv_heads, past, head_dim];
* outputs ``logits`` float32 [batch, sequence, vocab], ``present.<layer>.key`` and ``.value`` float32
  [batch, kv_heads, past + sequence, head_dim].

model.onnx is the graph alone. Its weights are ONNX external data that lies in the safetensors files themselves, which
therefore stand beside it and are copied to OUT_DIR with the configuration and the tokenizer. So one directory serves both
ONNX Runtime and whatever reads Hugging Face models (vLLM, transformers), with the very same numbers. A session has
to be made from the file's path: a graph loaded from memory does not know where its weights are.

The graph uses standard operators only (opset 17) and computes in float32. A query attends to the keys at or before
its own place whose ``attention_mask`` is not 0, so requests with pasts of different lengths can share a batch when the
shorter ones are padded with zeros at either end and ``position_ids`` count real tokens. Needs ``onnx`` and ``numpy``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
MASKED = -1e9
"""Added to a masked score: far below any real one, so that softmax gives exactly 0, and finite, so that a row with nothing
to attend to (padding) is no NaN, which would spread through the values."""

DTYPES = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class LlamaShape:
    """What the graph needs to know of config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaShape:
        """Raises ValueError naming the field for a config that this graph would compute wrongly."""
        for name, wanted in {
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }.items():
            value = config.get(name, wanted)
            if value != wanted:
                raise ValueError(f"config.json: {name} is {value!r}, this exporter knows only {wanted!r}")
        # transformers 5 keeps RoPE in rope_parameters, 4 in rope_theta and rope_scaling
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"config.json: rope_type is {rope_type!r}, this exporter knows only 'default'")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            tied=config.get("tie_word_embeddings", False),
        )


def external_tensors(files: list[Path]) -> dict[str, TensorProto]:
    """The tensors of safetensors files as ONNX external data: 8 bytes of header length, a JSON header, then the numbers."""
    tensors: dict[str, TensorProto] = {}
    for file in files:
        with file.open("rb") as stream:
            (header_length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(header_length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{file.name}: {name} has dtype {entry['dtype']}, known are {', '.join(DTYPES)}")
            begin, end = entry["data_offsets"]
            tensor = TensorProto(name=name, data_type=DTYPES[entry["dtype"]], dims=entry["shape"])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": file.name, "offset": 8 + header_length + begin, "length": end - begin}.items():
                tensor.external_data.add(key=key, value=str(value))
            tensors[name] = tensor
    return tensors


class GraphBuilder:
    """Collects nodes and initializers; every method returns the name of the value it made."""

    def __init__(self, weights: dict[str, TensorProto]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._weights = weights
        self._known: dict[str, str] = {}

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=f"node_{output}", **attributes))
        return output

    def split(self, value: str, sizes: list[int], axis: int) -> list[str]:
        outputs = [f"Split_{len(self.nodes)}_{part}" for part in range(len(sizes))]
        node = helper.make_node("Split", [value, self.int64s(sizes)], outputs, name=f"node_{outputs[0]}", axis=axis)
        self.nodes.append(node)
        return outputs

    def constant(self, name: str, value: np.ndarray) -> str:
        if name not in self._known:
            self.initializers.append(numpy_helper.from_array(value, name))
            self._known[name] = name
        return self._known[name]

    def int64s(self, values: list[int]) -> str:
        return self.constant("ints_" + "_".join(map(str, values)).replace("-", "m"), np.array(values, dtype=np.int64))

    def int64(self, value: int) -> str:
        return self.constant(f"int_{value}".replace("-", "m"), np.array(value, dtype=np.int64))

    def float32(self, value: float) -> str:
        return self.constant(f"float_{value!r}", np.array(value, dtype=np.float32))

    def weight(self, name: str) -> str:
        """The weight as float32, in the layout of the file; a cast of a constant is folded when the session is made."""
        if name not in self._known:
            if name not in self._weights:
                raise ValueError(f"the safetensors files have no tensor {name!r}")
            tensor = self._weights[name]
            self.initializers.append(tensor)
            self._known[name] = name
            if tensor.data_type != TensorProto.FLOAT:
                self._known[name] = self.op("Cast", name, name=f"{name}.float32", to=TensorProto.FLOAT)
        return self._known[name]

    def linear(self, value: str, *names: str) -> str:
        """value @ concat(weights).T; the transposed, joined constant is made once, when the session is."""
        parts = [self.op("Transpose", self.weight(name), perm=[1, 0]) for name in names]
        joined = parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=1)
        return self.op("MatMul", value, joined)

    def rms_norm(self, value: str, name: str, eps: float) -> str:
        # this very sequence is what ONNX Runtime fuses into one kernel
        mean = self.op("ReduceMean", self.op("Pow", value, self.float32(2.0)), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.float32(eps)))
        return self.op("Mul", self.op("Div", value, root), self.weight(name))

    def rotary_tables(self, shape: LlamaShape) -> tuple[str, str]:
        """cos, and sin with the sign of the half it is for, [batch, sequence, 1, head_dim]."""
        exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
        frequencies = (1.0 / np.float32(shape.rope_theta) ** exponents).astype(np.float32)
        positions = self.op("Cast", self.op("Unsqueeze", "position_ids", self.int64s([2, 3])), to=TensorProto.FLOAT)
        angles = self.op("Mul", positions, self.constant("rope_frequencies", frequencies))
        cos, sin = self.op("Cos", angles), self.op("Sin", angles)
        return self.op("Concat", cos, cos, axis=-1), self.op("Concat", self.op("Neg", sin), sin, axis=-1)

    def attention_bias(self) -> str:
        """0 where a query may look, MASKED elsewhere: [batch, 1, 1, sequence, past + sequence]."""
        sequence = self.op("Gather", self.op("Shape", "input_ids"), self.int64(1), axis=0)
        total = self.op("Gather", self.op("Shape", "attention_mask"), self.int64(1), axis=0)
        keys = self.op("Range", self.int64(0), total, self.int64(1))
        queries = self.op("Range", self.op("Sub", total, sequence), total, self.int64(1))
        causal = self.op("LessOrEqual", keys, self.op("Unsqueeze", queries, self.int64s([1])))
        real = self.op("Cast", self.op("Unsqueeze", "attention_mask", self.int64s([1, 2, 3])), to=TensorProto.BOOL)
        return self.op("Where", self.op("And", real, causal), self.float32(0.0), self.float32(MASKED))


def build(shape: LlamaShape, weights: dict[str, TensorProto]) -> onnx.ModelProto:
    """The decoder's graph: grouped-query attention, rotary embedding, RMS norm, gated MLP."""
    graph = GraphBuilder(weights)
    groups = shape.heads // shape.kv_heads
    query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    cos, sin = graph.rotary_tables(shape)
    bias = graph.attention_bias()
    hidden = graph.op("Gather", graph.weight("model.embed_tokens.weight"), "input_ids", axis=0)

    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        normed = graph.rms_norm(hidden, at + "input_layernorm.weight", shape.norm_eps)
        projected = graph.linear(normed, *(f"{at}self_attn.{name}_proj.weight" for name in "qkv"))
        # queries and keys are rotated together
        rotated, value = graph.split(projected, [query_width + kv_width, kv_width], axis=2)
        rotated = graph.op("Reshape", rotated, graph.int64s([0, 0, shape.heads + shape.kv_heads, shape.head_dim]))
        first, second = graph.split(rotated, [shape.head_dim // 2] * 2, axis=3)
        swapped = graph.op("Concat", second, first, axis=-1)
        rotated = graph.op("Add", graph.op("Mul", rotated, cos), graph.op("Mul", swapped, sin))
        query, key = graph.split(rotated, [shape.heads, shape.kv_heads], axis=2)
        value = graph.op("Reshape", value, graph.int64s([0, 0, shape.kv_heads, shape.head_dim]))
        key = graph.op("Transpose", key, perm=[0, 2, 1, 3])
        value = graph.op("Transpose", value, perm=[0, 2, 1, 3])
        key = graph.op("Concat", f"past_key_values.{layer}.key", key, name=f"present.{layer}.key", axis=2)
        value = graph.op("Concat", f"past_key_values.{layer}.value", value, name=f"present.{layer}.value", axis=2)

        # the queries of a group share their key head: one matrix product [groups * sequence, past + sequence] for each
        query = graph.op("Reshape", query, graph.int64s([0, 0, shape.kv_heads, groups, shape.head_dim]))
        query = graph.op("Transpose", query, perm=[0, 2, 3, 1, 4])
        grouped = graph.op("Reshape", query, graph.int64s([0, 0, -1, shape.head_dim]))
        scores = graph.op("MatMul", grouped, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.op("Mul", scores, graph.float32(shape.head_dim**-0.5))
        query_shape = graph.op("Shape", query, start=0, end=4)
        scores = graph.op("Reshape", scores, graph.op("Concat", query_shape, graph.int64s([-1]), axis=0))
        attention = graph.op("Softmax", graph.op("Add", scores, bias), axis=-1)
        attention = graph.op(
            "Reshape", attention, graph.op("Concat", graph.op("Shape", grouped, start=0, end=3), graph.int64s([-1]), axis=0)
        )
        mixed = graph.op("Reshape", graph.op("MatMul", attention, value), graph.op("Shape", query))
        mixed = graph.op("Transpose", mixed, perm=[0, 3, 1, 2, 4])
        mixed = graph.op("Reshape", mixed, graph.int64s([0, 0, query_width]))
        hidden = graph.op("Add", hidden, graph.linear(mixed, at + "self_attn.o_proj.weight"))

        normed = graph.rms_norm(hidden, at + "post_attention_layernorm.weight", shape.norm_eps)
        both = graph.linear(normed, at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight")
        gate, up = graph.split(both, [shape.intermediate] * 2, axis=2)
        gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
        hidden = graph.op("Add", hidden, graph.linear(gated, at + "mlp.down_proj.weight"))

    normed = graph.rms_norm(hidden, "model.norm.weight", shape.norm_eps)
    head = graph.op("Transpose", graph.weight("model.embed_tokens.weight" if shape.tied else "lm_head.weight"), perm=[1, 0])
    graph.op("MatMul", normed, head, name="logits")

    def tensor(name: str, kind: int, dims: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, dims)

    inputs = [
        tensor("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        tensor("attention_mask", TensorProto.INT64, ["batch", "total"]),
        tensor("position_ids", TensorProto.INT64, ["batch", "sequence"]),
    ]
    outputs = [tensor("logits", TensorProto.FLOAT, ["batch", "sequence", shape.vocab])]
    for layer in range(shape.layers):
        for part in ("key", "value"):
            dims: list[int | str] = ["batch", shape.kv_heads, "past", shape.head_dim]
            inputs.append(tensor(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, dims))
            outputs.append(tensor(f"present.{layer}.{part}", TensorProto.FLOAT, [*dims[:2], "total", shape.head_dim]))
    return helper.make_model(
        helper.make_graph(graph.nodes, "llama", inputs, outputs, graph.initializers),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="trio_frontend tools/export_onnx.py",
    )


def export(model_dir: Path, out_dir: Path) -> Path:
    """Write ``out_dir``/model.onnx and what stands beside it; returns its path. Raises ValueError for what it cannot export."""
    config = json.loads((model_dir / "config.json").read_text())
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir} has no *.safetensors")
    out_dir.mkdir(parents=True, exist_ok=True)
    if out_dir.resolve() != model_dir.resolve():
        for source in [*files, *(model_dir / name for name in COPIED)]:
            if source.exists():
                shutil.copyfile(source, out_dir / source.name)
    model = build(LlamaShape.from_config(config), external_tensors(files))
    path = out_dir / "model.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path), full_check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("out_dir", type=Path, nargs="?")
    arguments = parser.parse_args()
    path = export(arguments.model_dir, arguments.out_dir or arguments.model_dir)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
