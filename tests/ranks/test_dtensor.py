"""The DTensor styles: what torch's compute, with complete gradients laid out as parameters are.

Reference is the unsharded module in float64.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

import fusedcomm as fc
from fusedcomm.integrations.dtensor.layouts import as_whole
from tests.conftest import Pools
from tests.ranks.checking import compare
from tests.ranks.dtensor_models import (
    LIMIT,
    batch,
    check_grads,
    check_step,
    cut_decoder,
    loss_of,
    mesh_of,
    part,
    plan,
    whole_decoder,
)

# One Linear


def linear_cases(column: bool) -> Iterator[tuple[Any, ...]]:
    """Layouts in and out, DTensors or local, sizes, bias."""
    layouts = (Replicate(), Shard(0), Shard(1), Shard(-1))
    sizes = ((12, 12, True), (7, 10, False), (2, 3, True))
    for number, (into, out, dtensor, local_output) in enumerate(
        product(layouts, layouts, (True, False), (True, False))
    ):
        yield into, out, dtensor, local_output, *sizes[number % len(sizes)]
    default = (Replicate(), Shard(-1)) if column else (Shard(-1), Replicate())
    for size in sizes:
        yield *default, False, True, *size


def check_linear(rank: int, column: bool) -> None:
    mesh, world_size = mesh_of(), dist.get_world_size()
    style = fc.FusedColwiseParallel if column else fc.FusedRowwiseParallel
    for into, out, dtensor, local_output, *sizes, bias in linear_cases(column):
        what = f"{style.__name__} {into} -> {out}, {dtensor=} {local_output=} {sizes} {bias=}"
        torch.manual_seed(1)
        linear = nn.Linear(*sizes, bias).double()
        layer = copy.deepcopy(linear)
        options = dict(input_layouts=into, output_layouts=out, use_local_output=local_output)
        found = fc.parallelize_module(layer, mesh, style(**options))
        assert found is layer and isinstance(layer, nn.Linear)
        assert layer.weight.placements == (Shard(0 if column else 1),), what
        # Local shards must be equal: nothing tells their number of rows.
        tokens = (5, 3) if dtensor else (2 * world_size, 3 * world_size)
        x = torch.randn(*tokens, sizes[0], dtype=torch.float64, requires_grad=True)
        dy = torch.randn(*tokens, sizes[1], dtype=torch.float64)
        right = linear(x)
        right.backward(dy)
        if into == Shard(-1) and not dtensor and sizes[0] % world_size and column:
            continue  # from_local takes all shards to be equal, as torch's styles do
        start = part(x, mesh, into).clone().requires_grad_()
        given = as_whole(start, mesh, into, x.shape) if dtensor else start
        y = layer(given)
        assert isinstance(y, DTensor) is not local_output, what
        if isinstance(y, DTensor):
            assert y.shape == right.shape and y.full_tensor().shape == right.shape, what
        local = y.to_local() if isinstance(y, DTensor) else y
        compare(f"{what}: y", local, part(right, mesh, out), LIMIT)
        local.backward(part(dy, mesh, out))
        assert start.grad is not None and x.grad is not None
        compare(f"{what}: dx", start.grad, part(x.grad, mesh, into), LIMIT)
        check_grads(what, layer, linear)


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_linear_in_every_layout(pools: Pools, world_size: int, column: bool) -> None:
    pools(world_size).run(check_linear, column)


# A model


def check_decoder(rank: int, cut: bool, shared: bool) -> None:
    mesh = mesh_of()
    model, right = cut_decoder(mesh, cut, shared=shared), whole_decoder()
    check_step(f"{cut=} {shared=}", model, right)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            compare(mode.__name__, model(batch(7)), right(batch(7)), LIMIT)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_decoder(pools: Pools, world_size: int, cut: bool, shared: bool) -> None:
    pools(world_size).run(check_decoder, cut, shared)


# Copies, submeshes, torch's own function and styles


def check_copies(rank: int) -> None:
    """A deep copy, and a model that was saved and loaded, go on with the same peers."""
    mesh = mesh_of()
    for cut in (True, False):
        model, right = cut_decoder(mesh, cut), whole_decoder()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = (copy.deepcopy(model), torch.load(buffer, weights_only=False))
        for number, copied in enumerate(copies):
            check_step(f"{cut=} copy {number}", copied, right)
            assert copied.head.layouts.comm is fc.Communicator.of(mesh)
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
        check_step(f"{cut=} the original", model, right)


def check_submesh(rank: int) -> None:
    """The tensor-parallel axis of a larger mesh, either of its axes; rows may be far apart."""
    mesh = mesh_of(2, 2)
    right = whole_decoder()
    for axis in ("data", "tp"):
        for cut in (True, False):
            model = cut_decoder(mesh[axis], cut)
            check_step(f"{axis} {cut=}", model, right)


def check_with_torch(rank: int) -> None:
    """torch's ``parallelize_module``; its styles beside ours, and the same results as with them."""
    mesh = mesh_of()
    right = whole_decoder()
    mixed = plan(True)
    mixed["norm"] = torch_parallel.SequenceParallel()
    mixed["layers.*.mlp.down_proj"] = torch_parallel.RowwiseParallel(
        output_layouts=Shard(1), use_local_output=False
    )
    model = whole_decoder()
    assert torch_parallel.parallelize_module(model, mesh, mixed) is model
    loss, expected = loss_of(model, batch(8)), loss_of(right, batch(8))
    loss.backward()
    expected.backward()
    compare("loss", loss.detach(), expected.detach(), LIMIT)
    grads = dict(right.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        compare(name, parameter.grad.full_tensor(), grads[name].grad, LIMIT)  # type: ignore

    # Values of rank 0 count, wherever another rank's differ.
    torch.manual_seed(rank)
    layer, norm = nn.Linear(5, 7), nn.LayerNorm(5)
    nn.init.normal_(norm.weight)
    first = [value.clone() for value in (layer.weight, norm.weight)]
    for value in first:
        dist.broadcast(value.data, 0)
    fc.parallelize_module(layer, mesh, fc.FusedColwiseParallel())
    fc.parallelize_module(norm, mesh, fc.FusedSequenceParallel())
    for value, parameter in zip(first, (layer.weight, norm.weight), strict=True):
        assert torch.equal(parameter.full_tensor(), value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("world_size", "work"), [(2, check_copies), (4, check_submesh), (2, check_with_torch)]
)
def test_decoders_elsewhere(pools: Pools, world_size: int, work: Callable[[int], None]) -> None:
    pools(world_size).run(work)
