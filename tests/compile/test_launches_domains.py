"""Calls on GPU tensors of several domains up to their launches inside each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import fusedcomm as fc
from fusedcomm import crossing
from fusedcomm.between import Between
from tests.compile.stand_in import PROGRAMS, Driver, gpu
from tests.compile.test_launches import HOPPER, Events, _launched
from tests.ranks.test_domains_tensor_parallel import TWO_OF_TWO


@contextlib.contextmanager
def _domains(channel: str) -> Iterator[tuple[fc.Communicator, Driver]]:
    """A communicator whose domains' GPUs wait themselves for what crosses."""
    with (
        fc.Communicator.of(channel=channel) as comm,
        gpu(*HOPPER) as driver,
        mock.patch.object(Between, "on_stream", lambda self, device: True),
        mock.patch.object(
            Between, "_carrier", lambda self, device: crossing.OnStream(self._backend)
        ),
    ):
        yield comm, driver


def _calls(rank: int) -> dict[str, Events]:
    """Operations that cut tokens, forward and backward: name -> what the driver was asked for."""
    like = {"dtype": torch.bfloat16, "requires_grad": True}
    found: dict[str, Events] = {}
    with _domains("launches") as (comm, driver):

        def note(name: str) -> None:
            found[name] = list(driver.events)
            driver.events.clear()

        x, weight = torch.ones(256, 192, **like), torch.ones(320, 192, **like)
        options: dict[str, Any] = {"group": comm, "engine": "triton"}
        y = fc.all_gather_linear(x, weight, **options)
        note("gather")
        torch.autograd.grad(y, [x, weight], y.detach())
        note("gather, backward")
        y = fc.linear_reduce_scatter(x, weight, torch.ones(320, **like), **options)
        note("scatter")
        torch.autograd.grad(y, [x, weight], y.detach())
        note("scatter, backward")
    return found


def test_launches_in_two_domains(pools):
    """Those of one domain, twice; beside what crosses, multiprocessors are left to it."""
    found = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(_calls, timeout_s=280)[0]
    gather = ["begin", "push_kernel", "consume_kernel", "end"]
    scatter = ["begin", "produce_kernel", "reduce_kernel", "end"]
    weight = ["begin", "push_kernel", "weight_grad_kernel", "end"]
    both = ["begin", "push_kernel", "consume_kernel", "weight_grad_kernel", "end"]
    assert _launched(found["gather"]) == 2 * gather
    assert _launched(found["gather, backward"]) == 2 * scatter + 2 * weight
    assert _launched(found["scatter"]) == 2 * scatter
    assert _launched(found["scatter, backward"]) == 2 * both
    beside = PROGRAMS - crossing.CROSSING_PROGRAMS
    for name, kernel, grids in (
        ("gather", "consume_kernel", [beside, PROGRAMS]),
        ("scatter", "produce_kernel", [PROGRAMS, beside]),  # the other domain's sums first
    ):
        launches = [event for event in found[name] if event[0] == "launch"]
        assert [event[2] for event in launches if event[1] == kernel] == grids


def _experts(rank: int) -> dict[str, Events]:
    """The mixture of experts, forward and backward: name -> what the driver was asked for."""
    like: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    found: dict[str, Events] = {}
    with _domains("launches of experts") as (comm, driver):

        def note(name: str) -> None:
            found[name] = list(driver.events)
            driver.events.clear()

        options: dict[str, Any] = {"group": comm, "engine": "triton"}
        options |= {"capacity": 256, "max_tokens": 64}
        x, weights = torch.ones(64, 256, **like), torch.ones(64, 2, requires_grad=True)
        ids = (torch.arange(128).view(64, 2) + rank) % 4
        w13, w2 = torch.ones(1, 384, 256, **like), torch.ones(1, 256, 192, **like)
        y = fc.moe_ffn(x, ids, weights, w13, w2, num_experts=4, **options)
        note("moe_ffn")
        torch.autograd.grad(y, [x, weights, w13, w2], y.detach())
        note("moe_ffn, backward")
        d = fc.dispatch(x, ids, weights, 4, align=8, **options)
        note("dispatch")
        y = fc.combine(d.x, d)
        note("combine")
        torch.autograd.grad(y, [x, weights], y.detach())
        note("backward")
    return found


def test_launches_of_experts_in_two_domains(pools):
    """The kernels of one domain in two turns; the routing launches none."""
    found = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(_experts, timeout_s=280)[0]
    rows = ["begin", "places_kernel", "push_rows_kernel"]
    down = ["row_blocks_kernel", "down_kernel", "await_kernel"]
    ends = ["end", "end"]
    forward = ["begin", *rows, "up_kernel", *down, "take_kernel", "await_kernel"]
    assert _launched(found["moe_ffn"]) == 2 * [*forward, "take_kernel", "sum_kernel", *ends]
    gradients = ["grouped_weight_grad_kernel"] * 2
    grads = ["up_kernel", "activation_grad_kernel", *down, *gradients]
    backward = ["begin", *rows, *grads, "await_kernel", "sum_kernel"]
    assert _launched(found["moe_ffn, backward"]) == 2 * [*backward, *ends]
    sent = [*rows, "await_kernel", "take_kernel", "end"]
    returned = [*rows, "await_kernel", "sum_kernel", "end"]
    kept = [*rows, "await_kernel", "take_kernel", "sum_kernel", "end"]
    assert _launched(found["dispatch"]) == 2 * sent
    assert _launched(found["combine"]) == 2 * kept
    assert _launched(found["backward"]) == 2 * sent + 2 * returned
    beside = PROGRAMS - crossing.CROSSING_PROGRAMS
    launches = [event for event in found["moe_ffn"] if event[0] == "launch"]
    assert [event[2] for event in launches if event[1] == "up_kernel"] == [beside, PROGRAMS]
