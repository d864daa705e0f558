"""Calls on GPU tensors of several domains up to their launches inside each."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import fusedcomm as fc
from fusedcomm import crossing
from fusedcomm.between import Between
from tests.compile.stand_in import PROGRAMS, gpu
from tests.compile.test_launches import HOPPER, Events, _launched
from tests.ranks.test_domains_tensor_parallel import TWO_OF_TWO


def _calls(rank: int) -> dict[str, Events]:
    """Operations that cut tokens, forward and backward: name -> what the driver was asked for."""
    like = {"dtype": torch.bfloat16, "requires_grad": True}
    found: dict[str, Events] = {}
    with (
        fc.Communicator.of(channel="launches") as comm,
        gpu(*HOPPER) as driver,
        mock.patch.object(Between, "on_stream", lambda self, device: True),
        mock.patch.object(
            Between, "_carrier", lambda self, device: crossing.OnStream(self._backend)
        ),
    ):

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
