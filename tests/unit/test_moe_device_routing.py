"""The device's routing, in torch operations, gives what the host's gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedcomm as fc
from fusedcomm.engines.triton.constants import constants_of
from fusedcomm.engines.triton.routing import columns_of, fit, sort_choices
from fusedcomm.ops.checks_moe import INTEGERS
from fusedcomm.ops.moe import _ids_of
from fusedcomm.planning import capacity, routing
from tests.unit.test_moe_routing import routings

CPU = torch.device("cpu")


@settings(deadline=None)
@given(routings(), st.integers(0, 12))
def test_columns_order_and_what_is_dropped(given_: tuple, room: int) -> None:
    world_size, experts, owners, align, ids = given_
    placement = routing.place(experts, world_size, owners)
    known = constants_of(placement, CPU)
    columns = [routing.columns_of(own, placement) for own in ids]
    table = np.stack([routing.sort_choices(own, experts)[0] for own in columns])
    for rank, (own, right) in enumerate(zip(ids, columns, strict=True)):
        found = columns_of(torch.from_numpy(own), known)
        assert found.tolist() == right.tolist()
        counts, order, slot = routing.sort_choices(right, experts)
        got_order, got_slot, bounds = sort_choices(found, experts)
        assert bounds.diff().tolist() == counts.tolist() and int(bounds[0]) == 0
        assert got_order.tolist() == order.tolist() and got_slot.tolist() == slot.tolist()
        kept = fit(found, got_slot, bounds, torch.from_numpy(table), align, room, rank, known)
        dropped = capacity.drop(right, rank, table, placement, align, room)
        assert kept.tolist() == dropped.tolist()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_dtype_of_ids(dtype: torch.dtype) -> None:
    known = constants_of(routing.place(5, 2, (1, 0, 1, 0, 1)), CPU)
    ids = torch.tensor([[4, 0], [1, 100]]).to(dtype)
    assert columns_of(ids, known).tolist() == [[4, 2], [0, 5]]
    assert _ids_of(ids, 1).tolist() == [[4, 0], [-1, -1]]


def test_more_experts_than_16_bits_hold() -> None:
    experts = 1 << 16
    columns = torch.tensor([[experts - 1, experts], [3, 40_000]])
    order, slot, bounds = sort_choices(columns, experts)
    assert order.tolist() == [2, 3, 0, 1] and slot.tolist() == [[2, -1], [0, 1]]
    assert bounds[[0, 3, 4, 40_000, 40_001, -1]].tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_tokens_behind_the_last_have_no_expert(number: int) -> None:
    ids = torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]])
    right = [row if token < number else [-1, -1] for token, row in enumerate(ids[:, 0].tolist())]
    for given_ in (number, torch.tensor(number), torch.tensor([number], dtype=torch.uint8)):
        assert _ids_of(ids, given_).tolist() == right
    assert _ids_of(ids, None).tolist() == ids[:, 0].tolist()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (4, "from 0 to the 3 of x; got 4"),
        (-1, "got -1"),
        (True, "got bool"),
        (1.0, "got float"),
        (torch.tensor(1.0), "a tensor of torch.float32"),
        (torch.tensor([1, 2]), r"with shape \[2\]"),
        (torch.tensor(1, device="meta"), "lies on meta, but x on cpu"),
    ],
)
def test_wrong_numbers_of_tokens(wrong: Any, said: str) -> None:
    from fusedcomm.ops.checks_moe import check_num_tokens

    with pytest.raises(ValueError, match=said):
        check_num_tokens(torch.ones(3, 8), wrong)
    assert "num_tokens" in str(fc.dispatch.__doc__)
