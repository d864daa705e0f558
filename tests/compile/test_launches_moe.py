"""The mixture of experts on GPU tensors up to its launches: compiled, loaded, then started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusedcomm as fc
from tests.compile.stand_in import PROGRAMS, gpu
from tests.compile.test_launches import BLACKWELL, HOPPER, Events, _launched

EXPERTS, TOP_K, CAPACITY = 5, 2, 256


def _calls(rank: int, chip: tuple[int, int], hidden: int, ffn: int) -> dict[str, Events]:
    """Every operation, with many tokens, then with few: name -> what the driver was asked for."""
    comm = fc.Communicator.of(channel=f"experts {chip} {hidden} {ffn}")
    local = len(range(EXPERTS)[3 * rank : 3 * rank + 3]) if comm.world_size > 1 else EXPERTS
    like: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    w13, w2 = torch.ones(local, 2 * ffn, hidden, **like), torch.ones(local, hidden, ffn, **like)
    found: dict[str, Events] = {}
    with gpu(*chip) as driver:

        def note(name: str) -> None:
            found[name] = list(driver.events)
            driver.events.clear()

        for tokens in (64, 7):
            options: dict[str, Any] = {"group": comm, "engine": "triton"}
            options |= {"capacity": CAPACITY, "max_tokens": 64}
            x = torch.ones(tokens, hidden, **like)
            weights = torch.ones(tokens, TOP_K, requires_grad=True)
            ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)
            y = fc.moe_ffn(x, ids, weights, w13, w2, num_experts=EXPERTS, **options)
            note(f"moe_ffn of {tokens}")
            torch.autograd.grad(y, [x, weights, w13, w2], y.detach())
            note(f"moe_ffn of {tokens}, backward")
            again = {"num_experts": EXPERTS, "save_rows": False, **options}
            y = fc.moe_ffn(x.detach(), ids, weights, w13.detach(), w2.detach(), **again)
            driver.events.clear()
            torch.autograd.grad(y, weights, y.detach())
            note(f"rows of {tokens} made again")
            d = fc.dispatch(x, ids, weights, EXPERTS, overflow="drop", align=8, **options)
            note(f"dispatch of {tokens}")
            fc.combine(d.x, d).sum().backward()
            note(f"combine of {tokens}")
    comm.close()
    return found


COUNT = ["begin", "push_counts_kernel", "collect_kernel"]
BACK = ["row_blocks_kernel", "down_kernel", "await_kernel"]


@pytest.mark.parametrize(
    "world_size, chip, sizes",
    [(2, HOPPER, (256, 192)), (1, BLACKWELL, (72, 40))],
    ids=["even", "odd, one rank"],
)
def test_launches(pools, world_size, chip, sizes):
    found = pools(world_size).run(_calls, chip, *sizes, timeout_s=280)[0]
    route = [*COUNT, "places_kernel", "end"]
    rows = ["begin", "places_kernel", "push_rows_kernel"]
    forward = [*route, "begin", *rows, "up_kernel", *BACK, "take_kernel"]
    assert _launched(found["moe_ffn of 64"]) == [
        *forward,
        "await_kernel",
        "sum_kernel",
        *["end"] * 2,
    ]
    gradients = ["grouped_weight_grad_kernel"] * 2
    backward = ["begin", *rows, "up_kernel", "activation_grad_kernel", *BACK, *gradients]
    assert _launched(found["moe_ffn of 64, backward"]) == [
        *backward,
        "await_kernel",
        "sum_kernel",
        *["end"] * 2,
    ]
    made_again = ["begin", "places_kernel", "activation_kernel", *BACK, "sum_kernel", "end"]
    assert _launched(found["rows of 64 made again"]) == made_again
    sent = [*rows, "await_kernel", "take_kernel", "end"]
    assert _launched(found["dispatch of 64"]) == [*COUNT, "end", *route, *sent]
    returned = [*rows, "await_kernel", "sum_kernel", "end"]
    assert _launched(found["combine of 64"]) == [*returned, *sent, *returned]
    for name, events in found.items():
        grids = {event[1]: event[2] for event in events if event[0] == "launch"}
        if "of 7" in name:
            # Nothing is compiled for another number of tokens, and only their sum is another grid.
            assert {event[0] for event in events} == {"launch"}, name
            before = [e for e in found[name.replace("of 7", "of 64")] if e[0] == "launch"]
            assert [e for e in events if e[1] != "sum_kernel"] == [
                e for e in before if e[1] != "sum_kernel"
            ]
            assert grids.get("sum_kernel", 7) == 7
        elif "up_kernel" in grids:
            assert grids["up_kernel"] == grids["down_kernel"] == PROGRAMS
    first = found["moe_ffn of 64"]
    loaded = {event[1] for event in first if event[0] == "load"}
    assert loaded == set(_launched(first))
