"""Calls on GPU tensors up to their launches: every kernel compiles, is loaded, then started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedcomm as fc
from fusedcomm.ops.library import tensor_parallel as library
from tests.compile.stand_in import PROGRAMS, gpu

#: Compute capability, and bytes of shared memory that a program may have.
HOPPER, AMPERE, BLACKWELL = (90, 232_448), (80, 166_912), (100, 232_448)
Events = list[tuple[Any, ...]]


def _calls(
    rank: int, chip: tuple[int, int], rows: int, k: int, n: int, copies: bool
) -> tuple[dict[str, Events], set[str]]:
    """Every operation, forward and backward: name -> what the driver was asked for."""
    comm = fc.Communicator.of(channel=f"{chip} {rows} {k} {n} {copies}")
    like = {"dtype": torch.bfloat16, "requires_grad": True}
    found: dict[str, Events] = {}
    decide = library.plan
    with gpu(*chip) as driver:

        def note(name: str) -> None:
            found[name] = list(driver.events)
            driver.events.clear()

        library.plan = lambda *args, **kwargs: replace(decide(*args, **kwargs), copies=copies)
        try:
            x, weight, bias = torch.ones(rows, k, **like), torch.ones(n, k, **like), None
            if not copies:
                bias = torch.ones(n, **like)
            options: dict[str, Any] = {"group": comm, "engine": "triton"}
            y = fc.all_gather_linear(x, weight, bias, **options)
            note("gather")
            torch.autograd.grad(y, [x, weight], y.detach())
            note("gather, backward")
            y, kept = fc.all_gather_linear(x, weight, bias, return_gathered=True, **options)
            note("gather, kept")
            torch.autograd.grad([y, kept], [x, weight], [y.detach(), kept.detach()])
            note("gather, kept, backward")
            y = fc.linear_reduce_scatter(x, weight, bias, **options)
            note("scatter")
            torch.autograd.grad(y, [x, weight], y.detach())
            note("scatter, backward")
            more = torch.ones(2 * rows + 81, k, **like)
            fc.all_gather_linear(more, weight, bias, **options)
            fc.linear_reduce_scatter(more, weight, bias, **options)
            note("other tokens")
            if not copies:
                fc.linear_all_reduce(x.detach(), weight.detach(), bias.detach(), **options)
                note("reduce")
                fc.linear_all_reduce(torch.ones(300, k, **like), weight, bias, **options)
                note("reduce, large")
        finally:
            library.plan = decide
        cooperative = driver.cooperative
    comm.close()
    return found, cooperative


def _launched(events: Events) -> list[str]:
    return [event[1] for event in events if event[0] == "launch"]


@pytest.mark.parametrize(
    "world_size, chip, sizes",
    [
        (2, HOPPER, (256, 192, 320)),
        (2, AMPERE, (37, 50, 35)),
        (1, BLACKWELL, (64, 128, 64)),
        (1, HOPPER, (3, 1, 1)),
    ],
    ids=["even", "odd", "one rank", "extents of 1"],
)
def test_launches(pools, world_size, chip, sizes):
    found, cooperative = pools(world_size).run(_calls, chip, *sizes, False, timeout_s=280)[0]
    push = ["push_kernel"] * (world_size > 1)
    gather = ["begin", *push, "consume_kernel", "end"]
    assert _launched(found["gather"]) == gather
    assert _launched(found["gather, kept"]) == gather
    scatter = ["begin", "produce_kernel", "reduce_kernel", "end"]
    assert _launched(found["gather, kept, backward"]) == scatter
    weight = ["begin", *push, "weight_grad_kernel", "end"]
    assert _launched(found["gather, backward"]) == scatter + weight
    assert _launched(found["scatter"]) == scatter
    both = ["begin", *push, "consume_kernel", "weight_grad_kernel", "end"]
    assert _launched(found["scatter, backward"]) == both
    if sizes[0] > 128:  # else more rows take larger tiles
        assert "load" not in {event[0] for event in found["other tokens"]}
    for name in ("reduce", "reduce, large"):
        begin, kernel, end = _launched(found[name])
        assert (begin, end) == ("begin", "end") and kernel in cooperative
    # Everything is loaded before anything that may wait is started.
    assert {event[1] for event in found["gather"] if event[0] == "load"} == set(gather)
    kinds = [event[0] for event in found["gather"]]
    assert kinds == sorted(kinds, reverse=True), "a kernel was loaded behind a launch"
    grids = {event[1]: event[2] for event in found["gather"] if event[0] == "launch"}
    assert grids["consume_kernel"] == PROGRAMS and grids["begin"] == 1
    assert cooperative <= {"one_shot_kernel", "two_shot_kernel"}


def test_launches_beside_copies(pools):
    found, cooperative = pools(2).run(_calls, HOPPER, 256, 192, 320, True, timeout_s=280)[0]
    assert _launched(found["gather"]) == ["begin", "consume_kernel", "end"]
    assert _launched(found["scatter"]) == ["begin", "reduce_kernel", "end"]
    grids = {event[1]: event[2] for event in found["gather"] if event[0] == "launch"}
    assert 0 < grids["consume_kernel"] < PROGRAMS  # room for a copy that the driver makes a kernel
    assert not cooperative
