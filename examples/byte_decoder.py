"""A small decoder over bytes: plain PyTorch, nothing in it knows of ranks.

Llama's architecture (arXiv 2302.13971) and names, which is what ``fc.parallelize`` asks for. The
attention finds out from q, k and v how many heads it has, since a rank has only some.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    hidden: int = 96
    ffn: int = 256
    layers: int = 4
    heads: int = 6


def rotate(x: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of ``[batch, heads, T, head_dim]``."""
    tokens, size = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.outer(torch.arange(tokens, device=x.device), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x * angles.cos() + turned * angles.sin()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, T, size]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ByteDecoder(nn.Module):
    """Ids ``[batch, T]`` to logits ``[batch, T, 256]``; embedding and head share their weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(BYTES, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, BYTES, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (
                    (2 * shape.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
