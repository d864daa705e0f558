"""Gradients follow DTensor: after backward, every parameter's ``.grad`` is complete.

A model in which tokens are cut, replicated and cut again is compared with its unsharded twin.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedcomm as fc
from fusedcomm.nn import ColumnParallelLinear, GatedMLP, RowParallelLinear
from fusedcomm.parallel import sync_replicated
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.checking import bound, compare

HIDDEN, FFN = 12, 20
#: Rows of the micro-batches: even and uneven shards, and fewer rows than ranks.
BATCHES = (12, 7, 2)


class Pair(nn.Module):
    """``second(gelu(first(norm(x))))``."""

    def __init__(self, norm: nn.Module, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.second = norm, first, second

    def forward(self, x: Tensor, size: int) -> Tensor:
        options: dict[str, Any] = {}
        if getattr(self.first, "input_layout", "") == "sharded":
            options["gathered_size"] = size
        hidden = nn.functional.gelu(self.first(self.norm(x), **options))
        return self.second(hidden)


class Gated(nn.Module):
    """``x + down(silu(gate(norm(x))) · up(norm(x)))``."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor, size: int) -> Tensor:
        return x + self.mlp(self.norm(x), gathered_size=size)


class PlainGated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias)

    def forward(self, x: Tensor, gathered_size: int) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def unsharded() -> nn.ModuleDict:
    """Four blocks; the sharded twin has the layouts sharded-replicated-sharded-sharded between."""
    torch.manual_seed(1)
    model = nn.ModuleDict(
        {
            "leaving": Pair(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)),
            "inside": Pair(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)),
            "entering": Pair(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)),
            "cut": Gated(nn.RMSNorm(HIDDEN), PlainGated(bias=True)),
            "last": Pair(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)),
        }
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


#: Of every pair, whether tokens are cut in front of it and behind it.
LAYOUTS = {
    "leaving": ("sharded", "replicated"),
    "inside": ("replicated", "replicated"),
    "entering": ("replicated", "sharded"),
    "last": ("sharded", "sharded"),
}


def sharded() -> nn.ModuleDict:
    """The same model on this rank, with complete gradients."""
    model = unsharded()
    for name, (before, behind) in LAYOUTS.items():
        pair: Any = model[name]
        pair.first = ColumnParallelLinear.from_linear(pair.first, input_layout=before)
        pair.second = RowParallelLinear.from_linear(pair.second, output_layout=behind)
        if before == "sharded":
            sync_replicated(pair)
    cut: Any = model["cut"]
    cut.mlp = GatedMLP.from_linears(cut.mlp.gate_proj, cut.mlp.up_proj, cut.mlp.down_proj)
    sync_replicated(cut)
    return model


Block = Callable[[nn.Module, Tensor, int], Tensor]


def directly(block: nn.Module, x: Tensor, size: int) -> Tensor:
    return block(x, size)


def reentrant(block: nn.Module, x: Tensor, size: int) -> Tensor:
    return checkpoint(block, x, size, use_reentrant=True)


def non_reentrant(block: nn.Module, x: Tensor, size: int) -> Tensor:
    return checkpoint(block, x, size, use_reentrant=False)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x, dy = torch.randn(2, size, HIDDEN, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), dy


def forward(model: nn.ModuleDict, x: Tensor, size: int, run: Block) -> Tensor:
    for block in model.values():
        x = run(block, x, size)
    return x


def part_of(parameter: str, layer: nn.Module, full: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's part of a full parameter of ``layer``; the whole of a replicated one."""
    dim = getattr(layer, "shard_dims", {}).get(parameter)
    return full if dim is None else shard(full, dim, rank, world_size)


def check_parameters(model: nn.Module, reference: nn.Module, what: str) -> None:
    """Every parameter's ``.grad`` is this rank's part of the reference's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = dict(reference.named_parameters())
    for prefix, layer in model.named_modules():
        for short, parameter in layer.named_parameters(recurse=False):
            name = f"{prefix}.{short}"
            right = full[name].grad
            assert right is not None and parameter.grad is not None, f"{what}: {name} has no grad"
            right = part_of(short, layer, right, rank, world_size)
            compare(f"{what}: gradient of {name} on rank {rank} of {world_size}", parameter.grad,
                    right, bound(torch.float64, 1000, 10))  # fmt: skip


def check_chain(rank: int, run: Block) -> None:
    """All micro-batches in one accumulated gradient, and the inputs' gradients."""
    world_size = dist.get_world_size()
    reference, model = unsharded(), sharded()
    what = f"{run.__name__}"
    for size in BATCHES:
        x, dy = batch(size)
        right = forward(reference, x, size, directly)
        right.backward(dy)
        part = shard(x.detach(), 0, rank, world_size).requires_grad_()
        y = forward(model, part, size, run)
        y.backward(shard(dy, 0, rank, world_size))
        limit = bound(torch.float64, 1000, 10)
        assert x.grad is not None and part.grad is not None
        compare(f"{what}: y of {size} rows", y, shard(right, 0, rank, world_size), limit)
        compare(f"{what}: dx of {size} rows", part.grad, shard(x.grad, 0, rank, world_size), limit)
        check_parameters(model, reference, f"{what}, after {size} rows")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixed_chain_under_accumulation_and_checkpointing(pools: Pools, world_size: int) -> None:
    for run in (directly, non_reentrant, reentrant):
        pools(world_size).run(check_chain, run)


def check_grad_of(rank: int) -> None:
    """``torch.autograd.grad`` gets the same complete gradients as ``backward``."""
    world_size = dist.get_world_size()
    reference, model = unsharded(), sharded()
    x, dy = batch(7)
    (forward(reference, x, 7, directly) * dy).sum().backward()
    part = shard(x.detach(), 0, rank, world_size)
    y = forward(model, part, 7, directly)
    grads = torch.autograd.grad(y, list(model.parameters()), shard(dy, 0, rank, world_size))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    check_parameters(model, reference, "autograd.grad")


def test_autograd_grad(pools: Pools) -> None:
    pools(2).run(check_grad_of)


def summed(rank: int, module: nn.Module) -> bool:
    """Whether the gradient of a norm in a module is the sum over ranks: it is equal on all then."""
    norm = module.get_submodule("norm")
    assert isinstance(norm, nn.LayerNorm)
    norm.weight.grad = None
    x = torch.arange(12.0).view(3, 4) ** 2 + rank
    (norm(x) * (rank + 1)).sum(0).backward(torch.ones(4))
    own = norm(x).detach().sum(0) - 3 * norm.bias.detach()
    expected = own * sum(range(1, dist.get_world_size() + 1))
    assert norm.weight.grad is not None
    return torch.allclose(norm.weight.grad, expected)


def check_hooks(rank: int) -> None:
    """Removed hooks sum no more; parallel layers and frozen parameters get none."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(4)
    norm.bias.requires_grad_(False)
    module = nn.ModuleDict({"norm": norm, "linear": RowParallelLinear(4, 4)})
    summing = sync_replicated(module, fc.Communicator.of())
    for name, parameter in module.named_parameters():
        assert bool(parameter._backward_hooks) == (name == "norm.weight"), name
    assert summed(rank, module)
    summing.remove()
    assert not summed(rank, module)


def check_other_parameters(rank: int) -> None:
    """Copies sum, once each, and so do parameters that took others' place or were unfrozen."""
    module = nn.ModuleDict({"norm": nn.LayerNorm(4)})
    module["again"] = module["norm"]
    norm = module["norm"]
    assert isinstance(norm, nn.LayerNorm)
    norm.weight.requires_grad_(False)
    summing = sync_replicated(module)
    norm.weight.requires_grad_(True)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False), module):
        for _ in range(2):
            assert summed(rank, other)
    norm.weight = nn.Parameter(torch.ones(4))
    assert summed(rank, module)
    summing.remove()
    assert not summed(rank, module)


def test_copies_and_exchanged_parameters_are_summed(pools: Pools) -> None:
    pools(2).run(check_other_parameters)


def test_sync_replicated_can_be_undone(pools: Pools) -> None:
    pools(2).run(check_hooks)
