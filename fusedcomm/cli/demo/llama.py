"""A Llama that runs tensor-parallel on fusedcomm: what one rank computes, to be read as an example.

Every projection is one of two kinds, and a layer alternates them:

    column   q, k, v and gate, up (and the vocabulary): a rank holds some of the output features
    row      o and down: a rank holds some of the input features, so the ranks' results add up

What flows between them is one of two layouts, each an object with the methods ``column``, ``row``:

    layout        x between the layers                  column                 row
    TokenShards   a rank's tokens, [T/W, hidden]        all_gather_linear      linear_reduce_scatter
    Replicated    every token on every rank, [T, hidden]  a plain GEMM         linear_all_reduce
    Unsharded     there are no ranks                    a plain GEMM           a plain GEMM

Many tokens at once (the prefill) go as token shards: norms and residuals then cost a rank its own
tokens only, and both collectives hide behind their GEMMs. One token at a time (decoding) is
replicated. Weights and cache are the same for both.

Sharding follows the attention heads. A key-value head serves ``heads / kv_heads`` query heads, and
the ranks divide these groups by torch.chunk's rule, so that a rank's queries find their keys on the
same rank; feed-forward and vocabulary are divided by the same rule.

Architecture: Llama (arXiv 2302.13971) with grouped queries (arXiv 2305.13245). Names of weights as
in Hugging Face's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

import fusedcomm as fc
from fusedcomm.trace import span

EMBEDDING = "model.embed_tokens.weight"
LAST_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
OUT = "self_attn.o_proj.weight"
GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
DOWN = "mlp.down_proj.weight"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
LAYER = (*QKV, OUT, *GATE_UP, DOWN, *NORMS)  # after "model.layers.<index>."


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. ``head_size``: features of one head of queries, keys or values."""

    vocabulary: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    rope_theta: float


class Layout(Protocol):
    """How activations lie between the layers, and which ops that takes."""

    def column(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        """All tokens times several weights that share their input."""

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        """All tokens times a weight, summed over the ranks, in this layout."""


@dataclass(frozen=True)
class TokenShards:
    """Between the layers a rank has its part of ``tokens`` tokens (torch.chunk's rule)."""

    tokens: int
    engine: str = "auto"

    def column(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return fc.all_gather_linear(x, weights, gathered_size=self.tokens, engine=self.engine)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        return fc.linear_reduce_scatter(x, weight, engine=self.engine)


@dataclass(frozen=True)
class Replicated:
    """Between the layers every rank has every token."""

    engine: str = "auto"

    def column(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(linear(x, weight) for weight in weights)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        return fc.linear_all_reduce(x, weight, engine=self.engine)


@dataclass(frozen=True)
class Unsharded:
    """No ranks: the whole model in one process, to compare with."""

    def column(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(linear(x, weight) for weight in weights)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)


class Cache:
    """Keys and values of one rank's heads: ``[layers, kv_heads, capacity, head_size]`` each."""

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_size: int):
        self.keys = torch.empty(layers, kv_heads, capacity, head_size)
        self.values = torch.empty_like(self.keys)
        self.length = 0  # tokens seen by every layer


class Llama:
    """The part of a Llama that one rank holds; all of it without ranks.

    ``weights`` has this rank's shards under Hugging Face's names, as ``shard`` gives them.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]):
        self.config = config
        self.weights = weights
        self.layers = [
            {kind: weights[f"model.layers.{index}.{kind}"] for kind in LAYER}
            for index in range(config.layers)
        ]
        size = config.head_size
        self.kv_heads = self.layers[0][QKV[1]].shape[0] // size
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        self.frequencies = 1.0 / config.rope_theta**exponents  # [head_size / 2]

    def cache(self, capacity: int) -> Cache:
        """An empty cache for up to ``capacity`` tokens."""
        return Cache(self.config.layers, self.kv_heads, capacity, self.config.head_size)

    def forward(self, ids: Tensor, layout: Layout, cache: Cache, tokens: int) -> Tensor:
        """Logits of the next ``tokens`` tokens, ``[tokens, this rank's vocabulary]``.

        ids     [rows] of this rank: its shard of the tokens (TokenShards), or all of them
        cache   what came before; several tokens at once must be the first ones
        """
        x = embedding(ids, self.weights[EMBEDDING])  # [rows, hidden]
        positions = torch.arange(cache.length, cache.length + tokens)
        angles = torch.outer(positions.float(), self.frequencies).repeat(1, 2)
        rotation = (angles.cos(), angles.sin())  # [tokens, head_size] each
        for index, w in enumerate(self.layers):
            part = partial(span, "part of the model", layer=index)  # names it in the timeline
            h = self.norm(x, w[NORMS[0]])
            with part("q, k, v"):
                q, k, v = layout.column(h, [w[name] for name in QKV])
            with part("attention"):
                h = self.attend(q, k, v, rotation, cache, index)
            with part("o"):
                x = x + layout.row(h, w[OUT])
            h = self.norm(x, w[NORMS[1]])
            with part("gate, up"):
                gate, up = layout.column(h, [w[name] for name in GATE_UP])
            h = silu(gate) * up
            with part("down"):
                x = x + layout.row(h, w[DOWN])
        cache.length += tokens
        x = self.norm(x, self.weights[LAST_NORM])
        with span("part of the model", "vocabulary"):
            (logits,) = layout.column(x, [self.weights[HEAD]])
        return logits

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467) over the features."""
        return rms_norm(x, (self.config.hidden,), weight, self.config.norm_eps)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Cache,
        index: int,
    ) -> Tensor:
        """Causal attention of all tokens over this rank's heads, ``[tokens, heads * head_size]``.

        Needs no communication: the groups of heads are whole.
        """
        start, tokens = cache.length, q.shape[0]
        if start and tokens > 1:
            raise ValueError("several tokens at once must be the first ones of the cache")
        q, k, v = (t.unflatten(1, (-1, self.config.head_size)).transpose(0, 1) for t in (q, k, v))
        keys, values = cache.keys[index], cache.values[index]  # [kv_heads, capacity, head_size]
        keys[:, start : start + tokens] = _rotate(k, rotation)
        values[:, start : start + tokens] = v
        out = scaled_dot_product_attention(
            _rotate(q, rotation).unsqueeze(0),
            keys[:, : start + tokens].unsqueeze(0),
            values[:, : start + tokens].unsqueeze(0),
            is_causal=tokens > 1,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (arXiv 2104.09864), first half paired with second. x: [heads, T, size]."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
