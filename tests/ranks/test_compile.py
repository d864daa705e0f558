"""``torch.compile(fullgraph=True)`` sees the operations, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedcomm as fc
from fusedcomm.nn import GatedMLP
from tests.conftest import Pools
from tests.ranks.cases import shard
from tests.ranks.checking import bound, compare

HIDDEN, FFN = 6, 10


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, size: int) -> Tensor:
    hidden = F.gelu(fc.all_gather_linear(x, w1, b1, gathered_size=size))
    return fc.linear_reduce_scatter(hidden, w2, b2)


def decode(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, size: int) -> Tensor:
    hidden = F.gelu(fc.replicated_linear(x, w1, b1))
    return fc.linear_all_reduce(hidden, w2, b2)


def several(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, size: int) -> Tensor:
    gate, up, gathered = fc.all_gather_linear(
        x, (w1, w1 * 0.5), (b1, None), gathered_size=size, return_gathered=True
    )
    y = fc.linear_reduce_scatter(F.silu(gate) * up, w2, b2, wire_dtype=torch.float32)
    return y * (1 + gathered.mean())


def inputs(size: int, cut: bool) -> list[Tensor]:
    """This rank's shards, requiring gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, w1, b1, w2, b2 = (
        draw(size, HIDDEN), draw(FFN, HIDDEN), draw(FFN), draw(HIDDEN, FFN), draw(HIDDEN),
    )  # fmt: skip
    shards = [
        shard(x, 0, rank, world_size) if cut else x,
        shard(w1, 0, rank, world_size),
        shard(b1, 0, rank, world_size),
        shard(w2, 1, rank, world_size),
        b2,
    ]
    return [part.clone().requires_grad_() for part in shards]


def results(fn: Callable[..., Tensor], size: int, cut: bool) -> list[Tensor]:
    leaves = inputs(size, cut)
    y = fn(*leaves, size)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) * 0.5)]


def check_compiled(rank: int) -> None:
    """The compiled functions give what the eager ones do, in one graph, for any size."""
    works = ((mlp, True, (8, 5, 12)), (decode, False, (8, 5)), (several, True, (8,)))
    for fn, cut, sizes in works:
        torch._dynamo.reset()
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        for size in sizes:
            found, right = results(compiled, size, cut), results(fn, size, cut)
            for i, (got, eager) in enumerate(zip(found, right, strict=True)):
                what = f"{fn.__name__}, {size} rows: result {i} on rank {rank}"
                compare(what, got, eager.double(), bound(torch.float32, 100, 4))


def check_compiled_module(rank: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    for layout in ("sharded", "replicated"):
        block = GatedMLP(HIDDEN, FFN, layout=layout)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        x = torch.randn(4, HIDDEN)
        torch.testing.assert_close(compiled(x), block(x))
        y = compiled(x)
        y.sum().backward()
        found = [parameter.grad for parameter in block.parameters()]
        block.zero_grad()
        block(x).sum().backward()
        for got, parameter in zip(found, block.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)


def gathered(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return fc.all_gather_linear(x, w, group=group)


def check_groups(rank: int) -> None:
    """A compiled function that is given another group runs on that one."""
    torch._dynamo.reset()
    compiled = torch.compile(gathered, fullgraph=True, backend="aot_eager")
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())][rank]
    comms = [fc.Communicator.of(channel=name) for name in ("one", "two")]
    x, w = torch.randn(2, HIDDEN), torch.randn(3, HIDDEN)
    for group in (*comms, alone, *reversed(comms), None):
        before = [comm._watch.number for comm in comms]
        y = compiled(x, w, group)
        issued = [comm._watch.number - old for comm, old in zip(comms, before, strict=True)]
        assert issued == [comm is group for comm in comms]
        assert y.shape[0] == 2 * (1 if group is alone else dist.get_world_size())
    for comm in comms:
        comm.close()


def check_operators(rank: int) -> None:
    """torch's own checks of the custom operators: schemas, fakes and autograd registrations."""
    comm = fc.Communicator.of()
    where = (comm.group.group_name, "", "host")
    w = comm.world_size
    x, big = torch.randn(3, 4, requires_grad=True), torch.randn(3 * w, 4, requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    library: Any = fc.ops.library.tensor_parallel
    checked = (
        (library.all_gather_linear, (x, [weight, weight], [bias], 3 * w, 1, 2, True, *where)),
        (library.linear_reduce_scatter, (big, weight, bias, None, 3 * w, 1, *where)),
        (library.linear_all_reduce, ([big], [weight], bias, None, *where)),
        (library.replicated_linear, (big, [weight], [bias], 1, *where)),
    )
    for op, arguments in checked:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor",
                              "test_autograd_registration"))  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "work", [check_compiled, check_compiled_module, check_groups, check_operators]
)
def test_compile(pools: Pools, world_size: int, work: Callable[[int], None]) -> None:
    pools(world_size).run(work, timeout_s=120)
