"""The demo's Llama against one written out, position by position and head by head, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedcomm.cli.demo.llama import Llama, LlamaConfig, Unsharded
from fusedcomm.cli.demo.reference import RandomModel, random_weights

CONFIG = LlamaConfig(
    vocabulary=50,
    hidden=24,
    ffn=40,
    layers=2,
    heads=6,
    kv_heads=3,
    head_size=4,
    norm_eps=1e-5,
    rope_theta=100.0,
)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + CONFIG.norm_eps) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Element i and i + size/2 are a point, turned by position / theta^(2i/size)."""
    half = CONFIG.head_size // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position / CONFIG.rope_theta ** (2 * i / CONFIG.head_size)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def slow_logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    w = {name: weight.double() for name, weight in weights.items()}
    size, group = CONFIG.head_size, CONFIG.heads // CONFIG.kv_heads
    xs = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(CONFIG.layers):
        p = f"model.layers.{layer}."
        hs = [norm(x, w[p + "input_layernorm.weight"]) for x in xs]
        q, k, v = ([w[f"{p}self_attn.{n}_proj.weight"] @ h for h in hs] for n in "qkv")
        for now in range(len(ids)):
            heads = []
            for head in range(CONFIG.heads):
                kv = slice(head // group * size, (head // group + 1) * size)
                query = rotated(q[now][head * size : (head + 1) * size], now)
                scores = torch.stack(
                    [query @ rotated(k[t][kv], t) / math.sqrt(size) for t in range(now + 1)]
                ).softmax(0)
                heads.append(sum(scores[t] * v[t][kv] for t in range(now + 1)))
            xs[now] = xs[now] + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
        for now, x in enumerate(xs):
            h = norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = (w[f"{p}mlp.{n}_proj.weight"] @ h for n in ("gate", "up"))
            xs[now] = x + w[p + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([w["lm_head.weight"] @ norm(x, w["model.norm.weight"]) for x in xs])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_logits() -> None:
    weights = random_weights(CONFIG, seed=3)
    model = Llama(CONFIG, weights)
    ids = [7, 0, 49, 7, 7, 21, 3]
    logits = model.forward(torch.tensor(ids), Unsharded(), model.cache(len(ids)), len(ids))
    assert relative(logits, slow_logits(weights, ids)) < 2e-6


def test_token_by_token_equals_all_at_once() -> None:
    weights = random_weights(CONFIG, seed=4)
    model = Llama(CONFIG, weights)
    ids = torch.tensor([5, 9, 9, 30, 11])
    whole = model.forward(ids, Unsharded(), model.cache(5), 5)
    cache = model.cache(8)
    parts = [model.forward(ids[:3], Unsharded(), cache, 3)]
    parts += [model.forward(ids[i : i + 1], Unsharded(), cache, 1) for i in (3, 4)]
    assert relative(torch.cat(parts), whole) < 2e-6


def test_random_model_does_not_settle_on_a_token() -> None:
    model = RandomModel(layers=2)
    tokens = model.greedy(model.prompt("Why?"), 8)
    assert len(tokens) == 8
    assert len(set(tokens)) > 4
    assert tokens == RandomModel(layers=2).greedy(model.prompt("Why?"), 8)
