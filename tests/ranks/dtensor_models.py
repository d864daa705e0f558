"""A small decoder, whole and cut by plans, and what its results must be."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from tests.ranks.checking import bound, compare

VOCABULARY, HIDDEN, HEADS, FFN = 19, 24, 6, 26
LIMIT = bound(torch.float64, 2000)


class RMSNorm(nn.Module):
    """As models on Hugging Face write it: nothing that a style could know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        def heads(flat: Tensor) -> Tensor:
            return flat.view(*flat.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN)
        self.down_proj = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = RMSNorm(HIDDEN)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """``checkpointing``: None, or torch.utils.checkpoint's ``use_reentrant``."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.checkpointing: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
        return self.head(self.norm(x))


def plan(cut: bool, shared: bool = True, local: bool = False) -> dict[str, ParallelStyle]:
    """A plan for every parameter of a ``Decoder``.

    Args:
        cut: activations between the layers are token shards; otherwise every rank has all.
        shared: q, k, v, and gate, up share one gather.
        local: local tensors between the layers: token shards of equal size.
    """
    between: Placement = Shard(1) if cut else Replicate()
    inner: dict[str, Any] = dict(input_layouts=between)
    outer: dict[str, Any] = dict(output_layouts=between, use_local_output=local or not cut)
    found: dict[str, ParallelStyle] = {
        "embedding": fc.ReplicateParallel(**outer),
        "layers.*.attention.o_proj": fc.FusedRowwiseParallel(**outer),
        "layers.*.mlp.down_proj": fc.FusedRowwiseParallel(**outer),
        "head": fc.FusedColwiseParallel(**inner, output_layouts=Replicate()),
    }
    for path, names in (("attention", ("q_proj", "k_proj", "v_proj")),
                        ("mlp", ("gate_proj", "up_proj"))):  # fmt: skip
        if shared:
            found[f"layers.*.{path}"] = fc.FusedGatherParallel(names, **inner)
        else:
            for name in names:
                found[f"layers.*.{path}.{name}"] = fc.FusedColwiseParallel(**inner)
    for norm in ("layers.*.norm1", "layers.*.norm2", "norm"):
        found[norm] = (
            fc.FusedSequenceParallel(use_local_output=local) if cut else fc.ReplicateParallel()
        )
    return found


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("data", "tp")[-len(sizes) :] if sizes else ("tp",)
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def whole_decoder(layers: int = 2, dtype: torch.dtype = torch.float64) -> Decoder:
    torch.manual_seed(11)
    return Decoder(layers).to(dtype)


def cut_decoder(mesh: DeviceMesh, cut: bool, layers: int = 2, **options: Any) -> Decoder:
    model = whole_decoder(layers)
    fc.parallelize_module(model, mesh, plan(cut, **options))
    return model


def batch(length: int, count: int = 2, seed: int = 0) -> Tensor:
    """``[count, length]`` token ids."""
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(VOCABULARY, (count, length), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def part(full: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """This rank's part, by torch's own rule."""
    return distribute_tensor(full.detach(), mesh, [placement], src_data_rank=None).to_local()


def check_grads(what: str, module: nn.Module, right: nn.Module, limit: float = LIMIT) -> None:
    """All gradients are there, complete, and DTensors that lie as their parameters do."""
    whole = dict(right.named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(whole), what
    for name, parameter in module.named_parameters():
        grad, expected = parameter.grad, whole[name].grad
        assert isinstance(parameter, DTensor), f"{what}: {name} is no DTensor"
        if expected is None:
            assert grad is None, f"{what}: {name} has a gradient"
            continue
        assert isinstance(grad, DTensor), f"{what}: the gradient of {name} is {type(grad)}"
        assert grad.placements == parameter.placements, f"{what}: {name} {grad.placements}"
        compare(f"{what}: gradient of {name}", grad.full_tensor(), expected, limit)


def check_step(
    what: str, model: nn.Module, right: nn.Module, lengths: tuple[int, ...] = (9, 7)
) -> None:
    """Loss and gradients, accumulated over batches, are those of the whole model."""
    for seed, length in enumerate(lengths):
        tokens = batch(length, seed=seed)
        loss, expected = loss_of(model, tokens), loss_of(right, tokens)
        loss.backward()
        expected.backward()
        compare(f"{what}: loss of {length} tokens", loss.detach(), expected.detach(), LIMIT)
    check_grads(what, model, right)
    model.zero_grad()
    right.zero_grad()


def copied(model: Any) -> Any:
    return copy.deepcopy(model)
