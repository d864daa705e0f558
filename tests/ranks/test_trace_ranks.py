"""Merging the timelines of several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.trace import Trace, record_plan, span
from tests.conftest import Pools

Found = list[tuple[int, str]]


def gather_in_world_and_subgroup(rank: int) -> tuple[Found, Found | None]:
    world_size = dist.get_world_size()
    subgroup = dist.new_group([0, world_size - 1])  # every rank must take part in making it
    with fc.trace() as t:
        for step in range(2):
            dist.barrier()
            with span("gemm", f"step {step} of {rank}"):
                pass
        record_plan("op", "host", world_size, "a reason")
    merged = t.gather()
    assert merged.plans == t.plans
    assert [e.start_ns for e in merged.events] == sorted(e.start_ns for e in merged.events)
    outer = rank in (0, world_size - 1)
    within = t.gather(subgroup) if outer else None
    return _names(merged), _names(within) if within is not None else None


def _names(t: Trace) -> Found:
    return sorted((e.rank, e.name) for e in t.events)


def test_gather_gives_every_rank_the_events_of_all_by_rank_in_the_group(pools: Pools) -> None:
    results = pools(3).run(gather_in_world_and_subgroup)
    for merged, _ in results:
        assert merged == [(r, f"step {s} of {r}") for r in range(3) for s in range(2)]
    assert results[1][1] is None
    for _, within in (results[0], results[2]):
        # Rank 2 of the world is rank 1 of the subgroup.
        expected = [(0, "step 0 of 0"), (0, "step 1 of 0"), (1, "step 0 of 2"), (1, "step 1 of 2")]
        assert within == expected


def trace_an_op(rank: int) -> dict[str, set[str]]:
    x = torch.ones(600, 64)
    weight = torch.ones(32, 64)
    with fc.trace() as t:
        fc.all_gather_linear(x, weight, engine="host")
    (plan,) = t.plans
    assert plan.op == "all_gather_linear" and plan.engine == "host" and plan.reason
    merged = t.gather()
    return {str(r): {e.kind for e in merged.events if e.rank == r} for r in range(2)}


def test_the_host_engine_marks_its_products_copies_and_waits(pools: Pools) -> None:
    for kinds in pools(2).run(trace_an_op):
        assert set(kinds) == {"0", "1"}
        assert all(found >= {"gemm", "copy", "wait"} for found in kinds.values())
