"""Gradients averaged while the backward pass goes on: right, overlapped, refused where wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

import fusedcomm as fc
from fusedcomm.parallel import data
from fusedcomm.testing import RankError
from tests.conftest import Pools

WIDTH, BATCH, STEPS = 24, 6, 4
#: Several buckets: a kilobyte each. (DDP makes the first one 1 MiB, in its first pass.)
SMALL = {"bucket_cap_mb": 0.001}


def model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


def batch(step: int, part: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def train(rank: int, how: str, parts: int, **options: Any) -> list[Tensor]:
    """The weights after some steps of ``parts`` accumulated batches each."""
    module = model()
    trained: nn.Module = module
    if how != "ours alone":
        trained = DistributedDataParallel(module, **SMALL, **options)
    if how == "hook":
        trained.register_comm_hook(None, data.all_reduce_hook)
    elif how == "average_in_backward":
        data.average_in_backward(trained)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            quiet = part < parts - 1 and how != "ours alone"
            with trained.no_sync() if quiet else nullcontext():
                trained(batch(step, part, rank)).square().mean().backward()
        if how == "ours alone":
            data.average_gradients(module, bucket_bytes=3000)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def compare(rank: int, parts: int) -> None:
    expected = train(rank, "torch's", parts)
    start = model()
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), expected, strict=True))
    for how, options in (
        ("hook", {}),
        ("average_in_backward", {}),
        ("hook", {"gradient_as_bucket_view": True}),
        ("hook", {"static_graph": True}),
        ("ours alone", {}),
    ):
        if options.get("static_graph") and parts > 1:
            continue  # DDP itself wants the first pass to synchronise then
        found = train(rank, how, parts, **options)
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
        gathered = [torch.empty_like(found[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found[0])
        assert all(torch.equal(other, found[0]) for other in gathered), "ranks differ"


@pytest.mark.parametrize("parts", [1, 3], ids=["each batch", "accumulated"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_hook_trains_to_the_same_weights(pools: Pools, world_size: int, parts: int) -> None:
    pools(world_size).run(compare, parts)


def in_half(rank: int) -> None:
    """Half types are added in float32 and rounded once; DDP does not divide before a hook."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    ddp = DistributedDataParallel(layer)
    data.average_in_backward(ddp)
    x = torch.full((1, 1), 60000.0 if rank < 2 else 6.0, dtype=torch.float16)
    ddp(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == torch.tensor((120006.0) / 3).half().item()


def test_half_types_do_not_overflow(pools: Pools) -> None:
    pools(3).run(in_half)


def on_a_group(rank: int) -> None:
    """Two groups at once; the hook's state is the group, as anywhere."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    layer = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(layer, process_group=mine)
    data.average_in_backward(ddp)
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.unique().tolist() == [1.0 + rank % 2]


def test_groups_that_are_not_the_world(pools: Pools) -> None:
    pools(4).run(on_a_group)


# Overlap


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, called: Callable[[], None]) -> Tensor:
        ctx.called = called
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.called()
        return dy, None


class Held(nn.Module):
    """Nothing, but its backward pass calls a function first."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        return _Held.apply(x, self.called)


def overlapped(rank: int) -> None:
    """Rank 0 gives no bucket until rank 1 has computed its last gradient.

    So rank 1's first bucket, which needs rank 0's, is under way while its backward pass goes on: a
    hook that waited for the bucket would wait for ever.
    """
    store = distributed_c10d._get_default_store()
    begun = threading.Event()
    average = data._average

    def noted(*args: Any) -> Tensor:
        begun.set()
        return average(*args)

    def in_the_middle() -> None:
        if rank == 1:
            assert begun.wait(30), "no bucket was begun while there were gradients to compute"

    def at_the_end() -> None:
        if rank == 1:
            last.append(time.perf_counter_ns())
            store.set("rank 1 is through", "yes")

    def at_the_beginning() -> None:
        if rank == 0:
            store.wait(["rank 1 is through"], timedelta(seconds=30))

    module = model()
    module.insert(4, Held(in_the_middle))
    ddp = DistributedDataParallel(module, **SMALL)
    data.average_in_backward(ddp)
    begun.set()
    ddp(batch(0, 0, rank)).sum().backward()  # DDP arranges its buckets in the first pass
    begun.clear()
    last: list[int] = []
    with mock.patch.object(data, "_average", noted), fc.trace() as t:
        x = Held(at_the_end)(batch(1, 0, rank).requires_grad_())
        Held(at_the_beginning)(ddp(x)).sum().backward()
    buckets = [event for event in t.events if event.kind == "bucket"]
    assert len(buckets) >= 3 and all(event.info["nbytes"] for event in buckets)
    if rank == 1:
        assert buckets[0].start_ns < last[0] < buckets[0].end_ns


def test_buckets_are_averaged_while_the_backward_pass_goes_on(pools: Pools) -> None:
    pools(2).run(overlapped)


# Faults


def die_in_backward(rank: int) -> str:
    ddp = DistributedDataParallel(model(), **SMALL)
    data.average_in_backward(ddp)
    for step in range(2):  # in the second pass DDP itself arranges its buckets with the others
        ddp(batch(step, 0, rank)).sum().backward()
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        for step in range(2, 4):
            ddp(batch(step, 0, rank)).sum().backward()
    return str(caught.value)


def test_a_rank_that_dies_ends_the_backward_pass(pools: Pools) -> None:
    outcomes = pools(2).outcomes(die_in_backward, timeout_s=40)
    assert outcomes[0].fate == "returned", outcomes[0]
    assert "PeerLostError" in outcomes[0].value or "rank 1" in outcomes[0].value


def wrong_arguments(rank: int) -> None:
    with pytest.raises(ValueError, match="must be a DistributedDataParallel"):
        data.average_in_backward(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes"):
        data.average_gradients(nn.Linear(1, 1), bucket_bytes=0)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradient of weight is sparse"):
        data.average_gradients(table)


def test_wrong_arguments(pools: Pools) -> None:
    pools(2).run(wrong_arguments)


# Without DDP


def some_without(rank: int) -> None:
    """Gradients that only some ranks have, of several dtypes, one without any, one frozen."""
    world_size = dist.get_world_size()
    module = nn.ParameterDict(
        {
            "everywhere": nn.Parameter(torch.zeros(3, 2)),
            "on rank 0": nn.Parameter(torch.zeros(5)),
            "nowhere": nn.Parameter(torch.zeros(2)),
            "frozen": nn.Parameter(torch.zeros(2), requires_grad=False),
            "narrow": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        }
    )
    module["everywhere"].grad = torch.full((2, 3), float(rank)).t()  # any strides
    module["narrow"].grad = torch.full((4,), float(rank), dtype=torch.bfloat16)
    if rank == 0:
        module["on rank 0"].grad = torch.full((5,), float(world_size))
    for bucket_bytes in (1, data.BUCKET_BYTES):
        data.average_gradients(module, bucket_bytes=bucket_bytes)
        average = (world_size - 1) / 2
        grad = {name: parameter.grad for name, parameter in module.items()}
        assert grad["everywhere"] is not None and bool((grad["everywhere"] == average).all())
        assert grad["narrow"] is not None and grad["narrow"].tolist() == [average] * 4
        assert grad["on rank 0"] is not None and grad["on rank 0"].tolist() == [1.0] * 5
        assert grad["nowhere"] is None and grad["frozen"] is None


def test_average_gradients(pools: Pools) -> None:
    for world_size in (1, 3):
        pools(world_size).run(some_without)


# Pipelines


def stages(rank: int, numbers: list[int], count: int, group: Any, how: str, dp: Any) -> list[Any]:
    made = []
    for number in numbers:
        torch.manual_seed(number)
        part: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        if how != "none":
            part = DistributedDataParallel(part, process_group=dp)
        if how == "average_in_backward":
            data.average_in_backward(part)
        elif how == "hook":
            part.register_comm_hook(dp, data.all_reduce_hook)
        made.append(PipelineStage(part, number, count, torch.device("cpu"), group=group))
    return made


def split_backward(rank: int, how: str, wrapped: int) -> None:
    """Each rank has two stages of four, and is the only replica of them; one uses DDP."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    how = how if rank == wrapped else "none"
    made = stages(rank, [rank, rank + 2], 4, dist.group.WORLD, how, alone)
    schedule = ScheduleInterleavedZeroBubble(
        made, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
    )
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)


@pytest.mark.parametrize(
    # Of stages behind the first, DDP does not even call the hook.
    ("how", "wrapped"), [("average_in_backward", 0), ("average_in_backward", 1), ("hook", 0)]
)  # fmt: skip
def test_a_schedule_that_splits_the_backward_pass_is_refused(
    pools: Pools, how: str, wrapped: int
) -> None:
    with pytest.raises(RankError, match="splits the backward pass") as caught:
        pools(2).run(split_backward, how, wrapped)
    assert "average_gradients(module)" in str(caught.value)
    pools(2).run(split_backward, "none", 0)  # without DDP the schedule is welcome


def whole_backward(rank: int) -> None:
    """Two stages, two replicas of each, and whole backward passes: as with torch's own hook."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    place = rank % 2
    found = []
    for how in ("plain DDP", "average_in_backward"):
        (stage,) = stages(rank, [place], 2, pipelines[rank // 2], how, replicas[place])
        schedule = Schedule1F1B(
            stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean()
        )
        torch.manual_seed(100 + rank // 2)
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        found.append([parameter.grad.clone() for parameter in stage.submod.parameters()])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right)


def test_a_schedule_of_whole_backward_passes_is_served(pools: Pools) -> None:
    pool = pools(4)
    pool.run(whole_backward)
