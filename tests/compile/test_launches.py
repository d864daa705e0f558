"""Calls on GPU tensors up to their launches: every kernel compiles, is loaded, then started."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedcomm as fc
from fusedcomm.engines.experts import Experts, Style
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import launches
from fusedcomm.ops.library import tensor_parallel as library
from fusedcomm.protocol import Space
from tests.compile.stand_in import GPU, PROGRAMS, gpu

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


def _gradients_of_experts(rank: int, chip: tuple[int, int], hidden: int, ffn: int) -> list[Events]:
    """What the driver is asked for by the experts' gradients, with one routing and another."""
    comm = fc.Communicator.of(channel=f"experts {chip} {hidden} {ffn}")
    like = {"dtype": torch.bfloat16}
    found = []
    with gpu(*chip) as driver:
        for total, counts in ((300, [0, 300, 0]), (64, [10, 20, 30])):
            rows = [torch.empty(total, n, **like) for n in (hidden, ffn, 2 * ffn, hidden)]
            w13, w2 = torch.empty(3, hidden, 2 * ffn, **like), torch.empty(3, ffn, hidden, **like)
            biases = torch.empty(3, 2 * ffn, **like), torch.empty(3, hidden, **like)
            own = Experts(w13, w2, *biases, Style("swiglu", "gate_up", True))
            places: Any = SimpleNamespace(first_E=torch.zeros(3, dtype=torch.int64))
            places.counts_E = torch.tensor(counts)
            with launches(comm, "experts", Space("experts", 1, 16, 1), "gradients", GPU) as launch:
                experts_grads(launch, places, *rows, own, [True] * 4)
            found.append(list(driver.events))
            driver.events.clear()
    comm.close()
    return found


@pytest.mark.parametrize(
    "chip, hidden, ffn, blocks",
    [(HOPPER, 2880, 1440, (23 * 12, 23 * 6)), (BLACKWELL, 72, 40, (1, 1))],
    ids=["large", "small"],
)
def test_launches_of_experts_gradients(pools, chip, hidden, ffn, blocks):
    first, again = pools(1).run(_gradients_of_experts, chip, hidden, ffn, timeout_s=280)[0]
    weights, biases = "grouped_weight_grad_kernel", "grouped_bias_grad_kernel"
    assert _launched(first) == ["begin", weights, weights, biases, biases, "end"]
    kinds = [event[0] for event in first]
    assert kinds == sorted(kinds, reverse=True), "a kernel was loaded behind a launch"
    grids = [event[2] for event in first if event[0] == "launch"]
    columns = [-(-2 * ffn // 256), -(-hidden // 256)]
    assert grids == [1, *(3 * number for number in (*blocks, *columns)), 1]
    assert again == [event for event in first if event[0] == "launch"]
