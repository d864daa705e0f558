"""A model cut by plans goes on training as before: checkpointing, autocast, FSDP2, saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.checking import calls, compare
from tests.ranks.dtensor_models import (
    LIMIT,
    Decoder,
    batch,
    check_step,
    cut_decoder,
    loss_of,
    mesh_of,
    plan,
    whole_decoder,
)

# Activation checkpointing


def check_checkpointing(rank: int, cut: bool) -> None:
    """Recomputed layers communicate again, with and without reentrance, under accumulation."""
    mesh, right = mesh_of(), whole_decoder()
    comm = fc.Communicator.of(mesh)
    made: dict[bool | None, list[str]] = {}
    for reentrant in (None, False, True):
        for local in (True, False):
            model = cut_decoder(mesh, cut, local=local)
            model.checkpointing = right.checkpointing = reentrant
            with calls(comm) as texts:
                check_step(f"{cut=} {reentrant=} {local=}", model, right, lengths=(6, 12))
            made[reentrant] = texts
    for reentrant in (False, True):
        again = len(made[reentrant]) - len(made[None])
        assert again >= (6 if cut else 2), f"{reentrant=}: only {again} calls were made again"


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpointing(pools: Pools, world_size: int, cut: bool) -> None:
    pools(world_size).run(check_checkpointing, cut)


# Mixed precision


def check_autocast(rank: int, cut: bool) -> None:
    """float32 weights, bfloat16 products: as the whole model under autocast, within rounding."""
    mesh = mesh_of()
    right = whole_decoder(dtype=torch.float32)
    model = whole_decoder(dtype=torch.float32)
    fc.parallelize_module(model, mesh, plan(cut))
    exact = whole_decoder()
    tokens = batch(9)
    losses = []
    for module in (model, right, exact):
        with torch.autocast("cpu", torch.bfloat16, enabled=module is not exact):
            loss = loss_of(module, tokens)
        loss.backward()
        losses.append(loss.detach())
    assert losses[0] != losses[2], "nothing was rounded to bfloat16"
    compare("loss", losses[0], losses[2], 1e-2)
    whole, ideal = dict(right.named_parameters()), dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor) and grad.dtype == torch.float32, name
        found, plain, true = grad.full_tensor(), whole[name].grad, ideal[name].grad
        assert plain is not None and true is not None
        if name.endswith("k_proj.weight") or name.endswith("q_proj.weight"):
            continue  # differences of nearly equal numbers: noise, in the whole model as well
        error = (found - true).norm() / true.norm()
        usual = (plain - true).norm() / true.norm()
        assert error <= 3 * usual + 1e-3, f"{name}: error {error:.2g}, unsharded {usual:.2g}"


def check_autocast_of_operations(rank: int) -> None:
    """Each operation computes in autocast's dtype, as ``F.linear`` does, and leaves float64."""
    world_size = dist.get_world_size()
    x, w = torch.randn(4 * world_size, 6), torch.randn(5, 6)
    b = torch.randn(5)
    own = x[4 * rank : 4 * rank + 4]
    works: tuple[tuple[str, Callable[..., Any], Tensor], ...] = (
        ("all_gather_linear", lambda x, w, b: fc.all_gather_linear(x, (w, w), (b, None))[0], own),
        ("linear_reduce_scatter", fc.linear_reduce_scatter, x),
        ("linear_all_reduce", fc.linear_all_reduce, x),
        ("replicated_linear", fc.replicated_linear, x),
    )
    for name, work, given in works:
        for graded in (False, True):
            leaves = [value.clone().requires_grad_(graded) for value in (given, w, b)]
            with torch.autocast("cpu", torch.bfloat16):
                y = work(*leaves)
                same = work(*(leaf.bfloat16() for leaf in leaves))
                wide = work(*(leaf.double() for leaf in leaves))
            assert y.dtype == torch.bfloat16 and torch.equal(y, same), name
            assert wide.dtype == torch.float64, name
            if graded:
                y.float().sum().backward()
                assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32
                           for leaf in leaves), name  # fmt: skip


@pytest.mark.parametrize("cut", [True, False])
def test_autocast(pools: Pools, cut: bool) -> None:
    pools(2).run(check_autocast, cut)


def test_autocast_of_operations(pools: Pools) -> None:
    pools(2).run(check_autocast_of_operations)


# FSDP2


def sharded_both_ways(cut: bool, **options: Any) -> Decoder:
    """Tensor-parallel first, then over the data axis."""
    mesh = mesh_of(2, 2)
    model = cut_decoder(mesh["tp"], cut)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"], **options)
    fully_shard(model, mesh=mesh["data"], **options)
    return model


def check_fsdp(rank: int, cut: bool) -> None:
    """Gradients, their norm, clipping, and a step, each rank of the data axis with its own data."""
    model, right = sharded_both_ways(cut), whole_decoder()
    model.checkpointing = False if cut else None  # the kind without reentrance, or none
    model_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(right.parameters(), lr=1e-2)
    line = rank // 2  # on the data axis
    for step in range(3):
        micro = 2 if step == 1 else 1
        for number in range(micro):
            model.set_requires_gradient_sync(number == micro - 1)
            tokens = [batch(9, seed=10 * step + 2 * number + one) for one in range(2)]
            (loss_of(model, tokens[line]) / micro).backward()
            (sum(loss_of(right, each) for each in tokens) / 2 / micro).backward()  # type: ignore
        whole = dict(right.named_parameters())
        for name, parameter in model.named_parameters():
            grad, expected = parameter.grad, whole[name].grad
            assert isinstance(grad, DTensor) and expected is not None, name
            assert grad.placements == parameter.placements, f"{name}: {grad.placements}"
            compare(f"step {step}: {name}", grad.full_tensor(), expected, LIMIT)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        expected_norm = nn.utils.clip_grad_norm_(right.parameters(), 0.1)
        assert isinstance(norm, DTensor)
        compare("norm", norm.full_tensor(), expected_norm, LIMIT)
        model_optimizer.step()
        optimizer.step()
        model_optimizer.zero_grad()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        # Adam divides by the root of squares: tiny gradients' rounding errors grow.
        compare(name, parameter.full_tensor(), whole[name], 1e-6)  # type: ignore[attr-defined]


def check_fsdp_precision(rank: int, cut: bool) -> None:
    """FSDP2's own mixed precision: weights kept in float64 here, computed with in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, right = sharded_both_ways(cut, mp_policy=policy), whole_decoder()
    tokens = batch(9)
    loss, expected = loss_of(model, tokens), loss_of(right, tokens)
    loss.backward()
    expected.backward()
    compare("loss", loss.detach(), expected.detach(), 1e-2)
    assert loss != expected, "nothing was rounded to bfloat16"
    whole = dict(right.named_parameters())
    for name in (
        "norm.weight",
        "layers.0.norm2.bias",
        "head.weight",
        "layers.0.mlp.down_proj.bias",
    ):
        parameter = model.get_parameter(name)
        assert parameter.dtype == torch.float64 and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]
        grad = whole[name].grad
        assert grad is not None
        compare(name, parameter.grad.full_tensor(), grad, 5e-2)


@pytest.mark.parametrize("cut", [True, False])
def test_fsdp_with_mixed_precision(pools: Pools, cut: bool) -> None:
    pools(4).run(check_fsdp_precision, cut, timeout_s=120)


@pytest.mark.parametrize("cut", [True, False])
def test_fsdp_over_tensor_parallel(pools: Pools, cut: bool) -> None:
    pools(4).run(check_fsdp, cut, timeout_s=120)


# Saved and loaded


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """One step, so that the optimizer has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(9)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def made(kind: str) -> nn.Module:
    if kind == "both ways":
        return sharded_both_ways(True)
    return whole_decoder() if kind == "whole" else cut_decoder(mesh_of(), kind == "cut")


def save(rank: int, kind: str, path: str) -> None:
    model = made(kind)
    states = get_state_dict(model, trained(model))
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)


def load(rank: int, kind: str, path: str) -> None:
    """The model, its optimizer's state and what they do next are those of the whole one."""
    model, right = made(kind), whole_decoder()
    expected = trained(right)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = ("model", "optimizer")
    states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    for _ in range(2):
        whole = dict(right.named_parameters())
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            compare(f"{kind}: {name}", full, whole[name], 1e-6)
        for each, one in ((model, optimizer), (right, expected)):
            loss_of(each, batch(7)).backward()
            one.step()
            one.zero_grad()


@pytest.mark.parametrize(
    ("saved", "world_size"), [("cut", 2), ("replicated", 3), ("whole", 1), ("both ways", 4)]
)
def test_a_checkpoint_goes_from_any_layout_to_any(
    pools: Pools, tmp_path: Path, saved: str, world_size: int
) -> None:
    pools(world_size).run(save, saved, str(tmp_path))
    targets = [("cut", 2), ("cut", 3), ("replicated", 1), ("whole", 1), ("both ways", 4)]
    for kind, size in targets if saved == "cut" else targets[1:4:2]:
        pools(size).run(load, kind, str(tmp_path))
