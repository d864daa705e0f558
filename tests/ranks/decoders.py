"""Decoders that tests cut: Hugging Face's, small and random, and one built by hand."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed lies on this machine

VOCABULARY = 97  # divided evenly by no number of ranks

#: Name -> class of the configuration, and what differs from ``small``'s.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases, tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama of 5 heads": (
        "LlamaConfig",
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
    ),
    "llama of 10 heads in 5 groups": (
        "LlamaConfig",
        {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3 of 5 heads": (
        "Qwen3Config",
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
    ),
}


def perturb(model: Any, seed: int = 1) -> Any:
    """As initialised, norms are 1, biases 0 and weights small: errors would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.dim() == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(0.08 * noise)
    return model


def small(name: str, **more: Any) -> Any:
    """2 layers, random; on 3 ranks ffn and vocabulary are uneven."""
    import transformers

    kind, options = MODELS[name]
    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
    )
    config = getattr(transformers, kind)(**(shape | options | more))
    torch.manual_seed(0)
    return perturb(transformers.AutoModelForCausalLM.from_config(config))


class Attention(nn.Module):
    """Causal self-attention with grouped queries and no positions."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(-2, -3).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attn = Attention(hidden, heads, kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class HandBuilt(nn.Module):
    """All parts at the top; called with ids ``[batch, T]`` or ``[T]``, returns logits."""

    def __init__(self, head: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(Block(24, 40, 12, 6) for _ in range(layers))
        self.norm = nn.LayerNorm(24, bias=False)
        self.lm_head = nn.Linear(24, VOCABULARY) if head else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def hand_built(**options: Any) -> HandBuilt:
    torch.manual_seed(0)
    return perturb(HandBuilt(**options))
