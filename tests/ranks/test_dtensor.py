"""The DTensor styles: what torch's compute, with complete gradients laid out as parameters are.

Reference is the unsharded module in float64.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

import fusedcomm as fc
from fusedcomm.integrations.dtensor.layouts import as_whole
from tests.conftest import Pools
from tests.ranks.checking import calls, compare
from tests.ranks.dtensor_models import (
    LIMIT,
    MLP,
    Decoder,
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


# One gather for several


def issued(model: nn.Module, tokens: Tensor) -> tuple[list[str], list[str]]:
    """The operations of a forward and of a backward pass, in order."""
    with calls(fc.Communicator.of(model.head.weight.device_mesh)) as texts:
        loss = loss_of(model, tokens)
        forward = len(texts)
        loss.backward()
    names = [text.split()[0] for text in texts]
    return names[:forward], names[forward:]


def check_exchanges(rank: int) -> None:
    """Every exchange there is, per layer of the model."""
    mesh, tokens, layers = mesh_of(), batch(8), 3

    def counts(cut: bool, shared: bool) -> tuple[dict[str, int], dict[str, int]]:
        found = issued(cut_decoder(mesh, cut, layers, shared=shared), tokens)
        return tuple({name: side.count(name) for name in side} for side in found)  # type: ignore

    gathers = {True: 2, False: 5}
    for shared in (True, False):
        forward, backward = counts(True, shared)
        gathered = gathers[shared] * layers + 1  # and one for the head
        assert forward == {"all_gather_linear": gathered, "linear_reduce_scatter": 2 * layers}
        norms = 3 * layers + 1  # parameters of norms: a weight, and a weight and a bias
        assert backward.pop("sum") == norms
        assert backward == {
            "linear_reduce_scatter_backward": 2 * layers,
            "all_gather_weight_grad": gathered,
            "linear_reduce_scatter": gathered,
        }
        forward, backward = counts(False, shared)
        assert forward == {"linear_all_reduce": 2 * layers}
        assert backward == {"linear_all_reduce": gathered}


class Careless(MLP):
    """An MLP that does not use its Linears as it should."""

    mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.mistake == "another input":
            return gate + self.up_proj(x * 1)
        if self.mistake == "twice":
            return gate * self.gate_proj(x)
        if self.mistake == "an error":
            raise KeyError("of the user's")
        return gate if self.mistake == "unused" else gate * self.up_proj(x)


def check_careless(rank: int) -> None:
    """Misuse raises; whatever happens, nothing is kept and the next forward is right."""
    model = Careless()
    style = fc.FusedGatherParallel(("gate_proj", "up_proj"))
    fc.parallelize_module(model, mesh_of(), style)
    sharing = model.gate_proj.sharing
    x = torch.randn(2, 3, 24)
    right = model(x)
    for mistake, message in (
        ("another input", "up_proj was called with another tensor"),
        ("twice", "gate_proj was called twice"),
        ("unused", "up_proj of .* had no call in the forward of Careless"),
        ("an error", "of the user's"),
    ):
        model.mistake = mistake
        with pytest.raises((RuntimeError, KeyError), match=message) as raised:
            model(x)
        raised.value.__traceback__ = None  # whose frames hold the input
        del raised
        assert not sharing.open and sharing._input is None and not sharing._outputs, mistake
        model.mistake = ""
        assert torch.equal(model(x), right)
    seen = weakref.ref(x)
    del x, right
    gc.collect()
    assert seen() is None, "the input outlives the forward"
    alone = model.gate_proj(torch.randn(2, 3, 24))  # not within the parent's forward
    assert alone.shape == (2, 3, model.gate_proj.weight.to_local().shape[0])


def test_exchanges_of_a_decoder(pools: Pools) -> None:
    pools(2).run(check_exchanges)


def test_a_shared_gather_cannot_leak(pools: Pools) -> None:
    pools(2).run(check_careless)


# What is wrong


def check_refusals(rank: int) -> None:
    mesh, model = mesh_of(), Decoder(1)
    column, row = fc.FusedColwiseParallel, fc.FusedRowwiseParallel

    def refused(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=match):
            call()

    def parallelize(plan: Any, on: Any = mesh, model: nn.Module = model) -> Callable[[], Any]:
        return lambda: fc.parallelize_module(model, on, plan)

    for key, message in (
        ("heads", "'heads' matches no module: the module has embedding, layers, norm, head"),
        ("layers.*.mlp.gate", r"'layers\.0\.mlp' has gate_proj, up_proj, down_proj"),
        ("head.weight", "'head' has no modules inside"),
    ):
        refused(ValueError, message, parallelize({"head": column(), key: column()}))
    assert type(model.head) is nn.Linear, "a plan was half applied"
    refused(NotImplementedError, "Embedding: use torch's own", parallelize({"embedding": row()}))
    refused(NotImplementedError, "Decoder", parallelize(column()))
    gather = fc.FusedGatherParallel(("q_proj", "w_proj"))
    refused(
        ValueError,
        "'w_proj', but Attention has only q_proj",
        parallelize({"layers.*.attention": gather}),
    )
    for names in ("q_proj", (), ("q_proj", "q_proj")):
        refused(
            ValueError, "sequence of different", lambda names=names: fc.FusedGatherParallel(names)
        )
    for style in (column, row):
        for name in ("input_layouts", "output_layouts"):
            refused(
                ValueError, f"{name} must be Shard", lambda s=style, n=name: s(**{n: Partial()})
            )
        refused(ValueError, "engine must be", lambda s=style: s(engine="fast"))
    if dist.get_world_size() % 2 == 0:
        two = mesh_of(2, dist.get_world_size() // 2)
        refused(ValueError, r"has 2 .*choose it, as in mesh\['tp'\]", parallelize(column(), two))
        refused(
            ValueError,
            r"has 2",
            lambda: torch_parallel.parallelize_module(model.head, two, column()),
        )

    model.head.weight = model.embedding.weight
    refused(
        ValueError,
        "embedding.weight and head.weight are one parameter",
        parallelize({"head": column()}),
    )
    parallelize({"layers.0.mlp.up_proj": column()})()
    refused(
        NotImplementedError, "was parallelized before", parallelize({"layers.0.mlp.up_proj": row()})
    )

    up = model.layers[0].mlp.up_proj
    other = mesh_of(1, dist.get_world_size())["data"]
    lost = distribute_tensor(torch.randn(2, 24), other, [Replicate()], src_data_rank=None)
    refused(ValueError, "the input is a DTensor on", lambda: up(lost))
    up.weight = nn.Parameter(up.weight.to_local())
    refused(
        RuntimeError,
        "weight of a parallelized ColumnLinear is no DTensor",
        lambda: up(torch.randn(2, 24)),
    )


def check_unequal_shards(rank: int) -> None:
    layer = nn.Linear(6, 6)
    fc.parallelize_module(layer, mesh_of(), fc.FusedColwiseParallel(input_layouts=Shard(0)))
    with pytest.raises(fc.MismatchError, match="ranks disagree"):
        layer(torch.randn(3 + rank, 6))
    layer.layouts.comm.close()  # unusable after such an error


def test_what_is_refused(pools: Pools) -> None:
    pools(2).run(check_refusals)


def test_unequal_local_shards(pools: Pools) -> None:
    pools(2).run(check_unequal_shards)


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
