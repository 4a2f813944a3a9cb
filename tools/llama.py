"""A Llama in plain PyTorch, to train: the parameters have the names and shapes of Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 448
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def as_hugging_face(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """config.json; RoPE is told both the ways of transformers 5 and of 4."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "dtype": "float32",
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class Llama(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, vocab]; the output matrix is the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.arange(config.max_positions).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # what is added to the residual stream starts smaller, by the number of additions
                shrink = (2 * config.layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
