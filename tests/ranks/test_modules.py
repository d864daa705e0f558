"""The modules hold the shards of an ``nn.Linear``, compute what it does, and give it back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fusedcomm as fc
from fusedcomm.nn import (
    ColumnParallelLinear,
    GatedMLP,
    RowParallelLinear,
    full_state_dict,
    load_full_state_dict,
)
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.checking import bound, compare

#: (in, out) features: even, uneven and empty shards.
SIZES = ((12, 12), (7, 10), (2, 3), (5, 1))
Layer = ColumnParallelLinear | RowParallelLinear
LAYERS: tuple[tuple[Any, str], ...] = tuple(
    product((ColumnParallelLinear, RowParallelLinear), ("sharded", "replicated"))
)


def make(kind: Any, layout: str, *sizes: int, **options: Any) -> Any:
    side = "input_layout" if kind is ColumnParallelLinear else "output_layout"
    return kind(*sizes, **{side: layout}, **options)


def adopt(kind: Any, layout: str, linear: nn.Linear) -> Any:
    side = "input_layout" if kind is ColumnParallelLinear else "output_layout"
    return kind.from_linear(linear, **{side: layout})


def check_shards(what: str, layer: Layer, linear: nn.Linear) -> None:
    """The layer's parameters are exactly this rank's chunks of the linear's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = dict(linear.named_parameters())
    assert list(dict(layer.named_parameters())) == list(whole), what
    for name, parameter in layer.named_parameters():
        dim = layer.shard_dims.get(name)
        right = whole[name] if dim is None else shard(whole[name], dim, rank, world_size)
        assert torch.equal(parameter, right), f"{what}: {name} on rank {rank} of {world_size}"
        assert parameter.dtype == right.dtype, f"{what}: {name}"


# Making them


def check_making(rank: int) -> None:
    """Drawn as ``nn.Linear`` draws, or taken from one."""
    for (kind, layout), sizes, bias in product(
        LAYERS, (*SIZES, (97, 30), (576, 96)), (True, False)
    ):
        what = f"{kind.__name__} {layout} {sizes} bias={bias}"
        torch.manual_seed(3)
        linear = nn.Linear(*sizes, bias)
        torch.manual_seed(3)
        layer = make(kind, layout, *sizes, bias=bias)
        check_shards(f"{what}, drawn", layer, linear)
        after = torch.rand(1)
        torch.manual_seed(3)
        nn.Linear(*sizes, bias)
        assert torch.equal(after, torch.rand(1)), f"{what}: other random state than nn.Linear's"
        torch.manual_seed(4)
        linear.reset_parameters()
        torch.manual_seed(4)
        layer.reset_parameters()
        check_shards(f"{what}, reset", layer, linear)
        before = torch.get_rng_state()
        check_shards(f"{what}, from_linear", adopt(kind, layout, linear), linear)
        assert torch.equal(torch.get_rng_state(), before), f"{what}: from_linear drew numbers"
        assert f"in_features={sizes[0]}, out_features={sizes[1]}, bias={bias}" in repr(layer)


def check_from_linear_keeps(rank: int) -> None:
    """What else an ``nn.Linear`` can be: of another dtype, frozen, in evaluation."""
    for kind, layout in LAYERS:
        linear = nn.Linear(6, 8, dtype=torch.bfloat16).eval()
        linear.weight.requires_grad_(False)
        layer = adopt(kind, layout, linear)
        check_shards(kind.__name__, layer, linear)
        assert not layer.training and not layer.weight.requires_grad and layer.bias.requires_grad
        layer.weight.data.zero_()
        assert linear.weight.any(), f"{kind.__name__}: from_linear shares memory with its source"
        assert make(kind, layout, 6, 8, dtype=torch.float16).weight.dtype == torch.float16
        meta = make(kind, layout, 6, 8, device="meta")
        assert meta.weight.is_meta
        meta.to_empty(device="cpu")
        load_full_state_dict(meta, nn.Linear(6, 8).state_dict())


def check_units(rank: int) -> None:
    """Attention heads are not cut through: 5 heads of 4 features on 2 ranks are 3 and 2."""
    linear = nn.Linear(20, 20)
    column = ColumnParallelLinear.from_linear(linear, unit=4)
    row = RowParallelLinear.from_linear(linear, unit=4)
    own = slice(*((0, 12), (12, 20))[rank])
    assert torch.equal(column.weight, linear.weight[own])
    assert torch.equal(column.bias, linear.bias[own])
    assert torch.equal(row.weight, linear.weight[:, own]) and torch.equal(row.bias, linear.bias)
    for layer in (column, row):
        state = full_state_dict(layer)
        assert all(torch.equal(state[name], full) for name, full in linear.state_dict().items())
    with pytest.raises(ValueError, match="cannot cut 20 features in multiples of 3"):
        ColumnParallelLinear(20, 20, unit=3)


def test_features_are_cut_in_units(pools: Pools) -> None:
    pools(2).run(check_units)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_are_the_chunks_of_a_linear(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_making)


def test_from_linear_keeps_dtype_mode_and_frozenness(pools: Pools) -> None:
    pools(2).run(check_from_linear_keeps)


# Computing


def check_layer(rank: int) -> None:
    """Forward and backward of both layers in both layouts against ``nn.Linear`` in float64."""
    world_size = dist.get_world_size()
    for (kind, layout), sizes, bias, dim in product(LAYERS, SIZES, (True, False), (0, 1, -2)):
        torch.manual_seed(5)
        linear = nn.Linear(*sizes, bias).double()
        layer = adopt(kind, layout, linear)
        x = torch.randn(7, 3, sizes[0], dtype=torch.float64, requires_grad=True)
        dy = torch.randn(7, 3, sizes[1], dtype=torch.float64)
        right = linear(x)
        right.backward(dy)
        column, cut = kind is ColumnParallelLinear, layout == "sharded"
        x_dim = (dim if cut else None) if column else -1
        y_dim = -1 if column else (dim if cut else None)

        def part(full: Tensor, along: int | None) -> Tensor:
            return full if along is None else shard(full, along, rank, world_size)

        local = part(x.detach(), x_dim).clone().requires_grad_()
        options: dict[str, Any] = {}
        if cut:
            size = x.shape[dim]
            options = dict(gather_dim=dim, gathered_size=size) if column else dict(scatter_dim=dim)
        y = layer(local, **options)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                again = layer(local, **options)
            assert torch.equal(again, y) and not again.requires_grad, f"under {mode.__name__}"
        y.backward(part(dy, y_dim))
        what = f"{kind.__name__} {layout} {sizes} bias={bias} dim={dim} on rank {rank}"
        limit = bound(torch.float64, 200)
        compare(f"{what}: y", y, part(right, y_dim), limit)
        assert local.grad is not None and x.grad is not None
        compare(f"{what}: dx", local.grad, part(x.grad, x_dim), limit)
        for name, parameter in linear.named_parameters():
            assert parameter.grad is not None
            full = part(parameter.grad, layer.shard_dims.get(name))
            compare(f"{what}: gradient of {name}", getattr(layer, name).grad, full, limit)


def check_gated(rank: int) -> None:
    """``GatedMLP`` in both layouts, with every activation and mix of biases."""
    world_size = dist.get_world_size()
    activations: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.gelu, torch.tanh)
    biases = ((False, False, False), (True, False, True), (True, True, True))
    layouts = (("sharded", 0), ("sharded", 1), ("sharded", -3), ("replicated", 0))
    for (layout, dim), (activation, has) in product(layouts, zip(activations, biases, strict=True)):
        torch.manual_seed(6)
        gate, up = (nn.Linear(6, 10, bias).double() for bias in has[:2])
        down = nn.Linear(10, 6, has[2]).double()
        block = GatedMLP.from_linears(gate, up, down, activation=activation, layout=layout)
        x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
        dy = torch.randn(5, 2, 6, dtype=torch.float64)
        right = down(activation(gate(x)) * up(x))
        right.backward(dy)
        cut = layout == "sharded"
        local = (shard(x.detach(), dim, rank, world_size) if cut else x.detach()).clone()
        local.requires_grad_()
        y = block(local, dim=dim, gathered_size=x.shape[dim])
        y.backward(shard(dy, dim, rank, world_size) if cut else dy)
        what = f"GatedMLP {layout} dim={dim} {activation.__name__} {has} on rank {rank}"
        limit = bound(torch.float64, 100, 20)
        assert local.grad is not None and x.grad is not None
        for name, got, full in (("y", y, right), ("dx", local.grad, x.grad)):
            expected = shard(full, dim, rank, world_size) if cut else full
            compare(f"{what}: {name}", got, expected, limit)
        for linear, layer in (
            (gate, block.gate_proj),
            (up, block.up_proj),
            (down, block.down_proj),
        ):
            for name, parameter in linear.named_parameters():
                along, grad = layer.shard_dims.get(name), parameter.grad
                assert grad is not None
                expected = grad if along is None else shard(grad, along, rank, world_size)
                compare(f"{what}: {name}", getattr(layer, name).grad, expected, limit)
    torch.manual_seed(7)
    made = GatedMLP(6, 10, bias=True, dtype=torch.float64)
    torch.manual_seed(7)
    for name, sizes in (("gate_proj", (6, 10)), ("up_proj", (6, 10)), ("down_proj", (10, 6))):
        check_shards(name, getattr(made, name), nn.Linear(*sizes, dtype=torch.float64))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_compute_what_a_linear_does(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_layer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gated_mlp(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_gated)


# State dicts and copies


def whole_model() -> nn.Sequential:
    """Names and shapes of the unsharded model."""
    return nn.Sequential(
        nn.LayerNorm(7),
        nn.Linear(7, 10),
        nn.ModuleDict({"inner": nn.Linear(10, 7, bias=False), "other": nn.Linear(7, 2)}),
    )


def cut_model(rank_seed: int) -> nn.Sequential:
    """Its sharded twin, with parameters of its own on every rank."""
    torch.manual_seed(rank_seed)
    inner = {"inner": RowParallelLinear(10, 7, bias=False), "other": RowParallelLinear(7, 2)}
    return nn.Sequential(nn.LayerNorm(7), ColumnParallelLinear(7, 10), nn.ModuleDict(inner))


def check_state(rank: int) -> None:
    torch.manual_seed(8)
    whole = whole_model()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    state = whole.state_dict()
    model = cut_model(100 + rank)
    assert list(model.state_dict()) == list(state)
    load_full_state_dict(model, state)
    linears: Any = [(model[1], whole[1])]
    linears += [(model[2][name], whole[2][name]) for name in ("inner", "other")]  # type: ignore
    for layer, linear in linears:
        check_shards("loaded", layer, linear)
    again = full_state_dict(model)
    assert list(again) == list(state)
    for name, value in again.items():
        assert torch.equal(value, state[name]) and not value.requires_grad, name
        assert value.is_contiguous(), name
    for value in again.values():
        value.zero_()
    assert all(torch.equal(v, state[n]) for n, v in full_state_dict(model).items()), "no copies"

    missing = {name: value for name, value in state.items() if name != "1.bias"}
    for strict in (True, False):
        try:
            load_full_state_dict(model, missing, strict=strict)
        except RuntimeError as error:
            assert strict and "1.bias" in str(error)
        else:
            assert not strict, "a missing name was accepted"
    for wrong in (torch.zeros(10, 8), torch.zeros(5, 7), torch.zeros(10), torch.zeros(10, 7, 1)):
        with pytest.raises(ValueError, match=r"1\.weight has shape .* \[10, 7\]"):
            load_full_state_dict(model, {**state, "1.weight": wrong})


def check_shared_layer(rank: int) -> None:
    """One layer under two names, as weights are tied."""
    layer = ColumnParallelLinear(4, 6)
    model = nn.ModuleDict({"a": layer, "b": layer})
    linear = nn.Linear(4, 6)
    whole = nn.ModuleDict({"a": linear, "b": linear})
    load_full_state_dict(model, whole.state_dict())
    check_shards("tied", layer, linear)
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, whole.state_dict()[name]), name


def check_copies(rank: int) -> None:
    """A deep copy, and a module that was saved and loaded, work on with the same peers."""
    model = nn.Sequential(ColumnParallelLinear(6, 8), nn.GELU(), RowParallelLinear(8, 6))
    x = torch.randn(4, 6)
    y = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(copied(x), y)
        copied[0].weight.data.zero_()
        assert torch.equal(model(x), y), "the copy shares its parameters"
        assert copied[0].comm is fc.Communicator.of()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_dicts_go_in_and_out(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_state)


def test_a_layer_under_two_names(pools: Pools) -> None:
    pools(2).run(check_shared_layer)


def test_copies(pools: Pools) -> None:
    pools(2).run(check_copies)
