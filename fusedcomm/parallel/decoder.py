"""The shape of decoder that ``parallelize`` can cut, and finding its parts in a model.

The names are those of Llama in Hugging Face's transformers, which many models share::

    model                       or the trunk itself
      model                     the trunk
        embed_tokens            nn.Embedding
        layers.<i>
          input_layernorm       any module whose parameters are vectors of the hidden size
          self_attn             q_proj, k_proj, v_proj, o_proj: nn.Linear; head_dim: int;
                                q_norm, k_norm, over one head: optional
          post_attention_layernorm
          mlp                   gate_proj, up_proj, down_proj: nn.Linear
        norm
      lm_head                   nn.Linear, optional; its weight may be the embedding's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj")

_SHAPE = "see fusedcomm.parallel.decoder for the shape of model that parallelize expects"


@dataclass
class Decoder:
    """The parts of a model.

    Attributes:
        model: the whole, which holds the head if there is one.
        trunk: holds embed_tokens, layers and norm.
        prefix: the trunk's name in the model, with a dot at its end if it has one.
        has_head: whether there is one.
        tied: whether head and embedding are one parameter.
        heads, kv_heads, head_dim: of the attention.
    """

    model: nn.Module
    trunk: Any
    prefix: str
    has_head: bool
    tied: bool
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def layers(self) -> list[Any]:
        return list(self.trunk.layers)

    def norms(self) -> Iterator[tuple[str, nn.Module]]:
        """What sees token shards, by name."""
        for index, layer in enumerate(self.layers):
            for name, child in layer.named_children():
                if name not in ("self_attn", "mlp"):
                    yield f"{self.prefix}layers.{index}.{name}", child
        yield f"{self.prefix}norm", self.trunk.norm

    def head_norms(self) -> Iterator[tuple[str, nn.Module]]:
        """What sees this rank's heads, by name."""
        for index, layer in enumerate(self.layers):
            for name in ("q_norm", "k_norm"):
                norm = getattr(layer.self_attn, name, None)
                if isinstance(norm, nn.Module):
                    yield f"{self.prefix}layers.{index}.self_attn.{name}", norm


def find(model: nn.Module) -> Decoder:
    """The parts of ``model``.

    Raises:
        ValueError: it has another shape; the message names what is missing or not expected.
    """
    trunk: Any = model
    prefix = ""
    if not hasattr(model, "layers") and hasattr(model, "model"):
        trunk, prefix = model.model, "model."
    kind = type(model).__name__
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise ValueError(
            f"{kind} has no decoder layers: expected an nn.ModuleList named model.layers or "
            f"layers; {_SHAPE}"
        )
    _expect(kind, trunk, f"{prefix}embed_tokens", nn.Embedding)
    head: Any = getattr(model, "lm_head", None)
    has_head = isinstance(head, nn.Linear)
    tied = has_head and head.weight is trunk.embed_tokens.weight
    heads = _heads(kind, layers[0], f"{prefix}layers.0")
    found = Decoder(model, trunk, prefix, has_head, tied, *heads)
    _expect(kind, trunk, f"{prefix}norm", nn.Module)
    for index, layer in enumerate(layers):
        where = f"{prefix}layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            _expect(kind, layer, f"{where}.{name}", nn.Module)
        for name in (*MLP, "down_proj"):
            _expect(kind, getattr(layer, "mlp", None), f"{where}.mlp.{name}", nn.Linear)
        if _heads(kind, layer, where) != (found.heads, found.kv_heads, found.head_dim):
            raise ValueError(f"{where}.self_attn of {kind} has other heads than layer 0")
    _expect_nothing_else(kind, found)
    return found


def _heads(kind: str, layer: Any, where: str) -> tuple[int, int, int]:
    """The counts of query heads and of key-value heads, and the size of one."""
    attention = getattr(layer, "self_attn", None)
    for name in (*ATTENTION, "o_proj"):
        _expect(kind, attention, f"{where}.self_attn.{name}", nn.Linear)
    size = getattr(attention, "head_dim", None)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{kind} has no {where}.self_attn.head_dim, an int; {_SHAPE}")
    q, k, v, o = (getattr(attention, name) for name in (*ATTENTION, "o_proj"))
    heads, kv_heads = q.out_features // size, k.out_features // size
    right = (
        q.out_features == heads * size == o.in_features
        and k.out_features == kv_heads * size == v.out_features
        and kv_heads > 0
        and heads % kv_heads == 0
    )
    if not right:
        raise ValueError(
            f"{where}.self_attn of {kind} has {q.out_features}, {k.out_features}, "
            f"{v.out_features} features of queries, keys, values, and {o.in_features} into "
            f"o_proj: expected whole heads of {size} features, and as many queries for every key"
        )
    return heads, kv_heads, size


def _expect(kind: str, parent: Any, path: str, expected: type) -> None:
    child = getattr(parent, path.rpartition(".")[2], None)
    if not isinstance(child, expected):
        got = "nothing" if child is None else f"a {type(child).__name__}"
        raise ValueError(
            f"{kind} has {got} at {path}: expected an nn.{expected.__name__}; {_SHAPE}"
        )


def _expect_nothing_else(kind: str, found: Decoder) -> None:
    """Every parameter belongs to a part whose gradient will be complete."""
    hidden = found.trunk.embed_tokens.embedding_dim
    sizes = {name: hidden for name, _ in found.norms()}
    sizes |= {name: found.head_dim for name, _ in found.head_norms()}
    known = {f"{found.prefix}embed_tokens"} | ({"lm_head"} if found.has_head else set())
    for index in range(len(found.layers)):
        where = f"{found.prefix}layers.{index}"
        known |= {f"{where}.self_attn.{name}" for name in (*ATTENTION, "o_proj")}
        known |= {f"{where}.mlp.{name}" for name in (*MLP, "down_proj")}
    for name, parameter in found.model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in known:
            continue
        if owner not in sizes:
            raise ValueError(f"{kind} has a parameter {name} that Llama has not; {_SHAPE}")
        if list(parameter.shape) != [sizes[owner]]:
            raise ValueError(
                f"{name} of {kind} has shape {list(parameter.shape)}: expected [{sizes[owner]}], "
                f"a norm of one token's features (of one head's in attention); {_SHAPE}"
            )
