"""Copies beside the kernels, as copy engines make them: no race, and planted faults are found.

On CPU ranks the copies run where they are written down; the race checker takes them for what they
are on a GPU, a stream of their own that is ordered with the call's by its forks and joins alone.
"""

from __future__ import annotations

import pytest

from fusedcomm.testing import races
from tests.interpreter.race_calls import Setting, calls, faulty_calls

GATHER, SCATTER = "all_gather_linear", "linear_reduce_scatter"
REUSED = f"{GATHER}, reused input"
FORWARD_GATHER, FORWARD_SCATTER = f"{GATHER}, forward", f"{SCATTER}, forward"


@pytest.mark.parametrize(
    "world_size, settings",
    [(2, {}), (2, {"tokens": 37, "pieces": 2, "same_slot": False}), (3, {"tokens": 2})],
    ids=["two ranks", "two pieces", "three ranks, one of them empty"],
)
def test_copies_are_clean(pools, world_size, settings):
    pool = pools(world_size, TRITON_INTERPRET="1")
    setting = Setting("triton", copies=True, **settings)
    ops = (GATHER, SCATTER, REUSED)
    recordings = pool.run(races.recorded, calls, world_size, setting, ops, timeout_s=120)
    assert races.check(recordings) == []
    for events in (recording.events for recording in recordings):
        copied = {(event.kind, event.launch) for event in events if event.stream == "copy"}
        assert copied >= {("read", None), ("write", None), ("release", None)}
        kernels = {event.launch.kernel for event in events if event.launch}
        assert kernels == {"begin", "end", "consume_kernel", "weight_grad_kernel", "reduce_kernel"}


@pytest.mark.parametrize(
    "fault, op, lines",
    [
        ("copies: flag before the data", FORWARD_GATHER, {"carry", "consume_kernel"}),
        ("copies: flag before the data", FORWARD_SCATTER, {"carry", "reduce_kernel"}),
        ("begin: no wait", FORWARD_GATHER, {"carry", "consume_kernel"}),
        ("begin: no wait", FORWARD_SCATTER, {"carry", "reduce_kernel"}),
        ("begin: slot used early", FORWARD_GATHER, {"carry", "consume_kernel"}),
        ("begin: slot used early", FORWARD_SCATTER, {"carry", "reduce_kernel"}),
        ("gather: no wait", FORWARD_GATHER, {"carry", "consume_kernel"}),
        ("scatter: no wait", FORWARD_SCATTER, {"carry", "reduce_kernel"}),
        ("copies: no fork", REUSED, {"carry", "_gather_reused"}),
        ("copies: no fork", FORWARD_GATHER, {"_raise", "begin"}),
        ("copies: no fork", FORWARD_SCATTER, {"carry", "add_linears"}),
        ("copies: no join", REUSED, {"carry", "_gather_reused"}),
    ],
)
def test_a_fault_is_found(pools, fault, op, lines):
    pool = pools(2, TRITON_INTERPRET="1")
    setting = Setting("triton", copies=True)
    found = races.find(pool, faulty_calls, 2, setting, (op,), fault)
    pairs = [{_place(race.first), _place(race.second)} for race in found]
    assert lines in pairs, list(map(str, found))


def _place(event: races.Event) -> str:
    """The kernel, or the function on the host, of an access."""
    return event.launch.kernel if event.launch else event.where.split()[-1]
