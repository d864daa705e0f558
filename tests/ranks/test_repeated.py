"""Collectives that are made again are as careful as the first ones."""

from __future__ import annotations

import pytest
import torch

import fusedcomm as fc
from fusedcomm.errors import ClosedError
from tests.conftest import Pools


def again(rank: int) -> None:
    comm = fc.Communicator.of()
    x, out = torch.full((4,), float(rank)), torch.empty(4)
    for _ in range(3):
        assert fc.all_reduce(x, out=out) is out
        assert out.tolist() == [1.0] * 4
        assert fc.all_reduce(x).tolist() == [1.0] * 4
    assert {key[0][0] for key in comm.repeated} == {"all_reduce"}
    before = len(comm.repeated)

    # What differs in anything but its values is checked again.
    with pytest.raises(ValueError, match="out must be"):
        fc.all_reduce(x, out=torch.empty(5))
    with pytest.raises(ValueError, match="out must be"):
        fc.all_reduce(x, out=torch.empty(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="engine must be"):
        fc.all_reduce(x, engine=["host"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op must be"):
        fc.all_reduce(x, op="mean")
    with pytest.raises(ValueError, match="dense"):
        fc.all_reduce(x.to_sparse())
    with pytest.raises(ValueError, match="must be a tensor"):
        fc.all_reduce([1.0])  # type: ignore[arg-type]
    memory = torch.zeros(7)
    fc.all_gather(memory[:2], out=memory[3:7])
    with pytest.raises(ValueError, match="shares memory"):
        fc.all_gather(memory[:2], out=memory[1:5])
    with pytest.raises(ValueError, match="shares memory"):
        fc.all_reduce(memory[:4], out=memory[3:])
    assert len(comm.repeated) == before + 1

    # Values where they are: in place, strided, and with gradients.
    y = x.clone()
    for _ in range(2):
        fc.all_reduce(y, out=y)
    assert y.tolist() == [2.0] * 4
    strided, into = torch.zeros(4, 2)[:, 0].copy_(x), torch.zeros(4, 2)[:, 1]
    assert fc.all_reduce(strided, out=into) is into
    assert into.tolist() == [1.0] * 4
    x.requires_grad_()
    fc.all_reduce(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4
    with pytest.raises(ValueError, match="has no derivative"):
        fc.all_reduce(x, out=out)


def test_a_call_made_again(pools: Pools) -> None:
    pools(2).run(again)


def closed(rank: int) -> None:
    x = torch.ones(3)
    comm = fc.Communicator.of(channel="made again")
    for _ in range(2):
        fc.all_reduce(x, group=comm)
    comm.close()
    with pytest.raises(ClosedError):
        fc.all_reduce(x, group=comm)
    present = fc.Communicator.of()
    fc.all_reduce(x)
    present.close()
    assert fc.all_reduce(x).tolist() == [2.0] * 3  # on a new one, as the first time
    assert fc.Communicator.of() is not present


def test_a_communicator_that_was_closed(pools: Pools) -> None:
    pools(2).run(closed)


def forgotten(rank: int) -> None:
    from fusedcomm.ops import repeated

    comm = fc.Communicator.of(channel="many kinds")
    for size in range(repeated._MOST + 2):
        fc.all_reduce(torch.ones(size), group=comm)
    assert 0 < len(comm.repeated) <= repeated._MOST


def test_kinds_are_not_remembered_without_end(pools: Pools) -> None:
    pools(2).run(forgotten)
