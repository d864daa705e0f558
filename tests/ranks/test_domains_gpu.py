"""What is particular to GPU tensors over several domains, on CPU ranks with stand-ins for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fusedcomm as fc
from fusedcomm import crossing
from fusedcomm.between import Between
from fusedcomm.engines.host import collectives as host
from fusedcomm.symmetric.devices import Domain
from tests.conftest import Pools
from tests.ranks.collective_calls import Checker
from tests.ranks.test_domains_tensor_parallel import TWO_OF_TWO

GPU = torch.device("cuda", 0)
THREE = "0,1;2,3;4,5"


@contextmanager
def staged() -> Iterator[None]:
    """Whatever crosses goes through memory of the host, as from a GPU without NCCL."""
    stream = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(Between, "_carrier", lambda self, device: self._staged),
        mock.patch.object(crossing, "_pinned", torch.empty_like),
        mock.patch("torch.cuda.current_stream", lambda device: stream),
    ):
        yield


def check_staged(rank: int) -> None:
    with staged():
        checker = Checker(fc.Communicator.of())
        for shape in ((5, 3), (0, 2), (8,)):
            checker.every_op(shape)
        checker.all_reduce((29,), torch.bfloat16, "avg")
        checker.finish()
        x = torch.full((7, 4), float(rank + 1))
        y = fc.linear_all_reduce(x, torch.ones(3, 4))
        assert bool((y == 4 * 21).all())


def test_what_crosses_through_the_hosts_memory(pools: Pools) -> None:
    pools(6, FUSEDCOMM_DOMAINS=THREE).run(check_staged, timeout_s=100)


def check_on_stream(rank: int) -> tuple[int, ...]:
    """Returns how often the domains compared: in a first call, in the second, where asked for."""
    comm = fc.Communicator.of()
    assert comm.inside is not None and comm.between is not None
    side = SimpleNamespace(seen=set(), left=0)
    left, described = [], 0
    gather, describe = host.all_gather, comm.between.describe

    def gathering(*args: Any) -> None:
        left.append(side.left)
        gather(*args)

    def describing(text: str) -> Any:
        nonlocal described
        described += 1
        return describe(text)

    found = []
    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        patch(Between, "on_stream", lambda self, device: True)
        patch(Between, "_carrier", lambda self, device: crossing.OnStream(self._backend))
        patch(fc.Communicator, "gpu", lambda self, device: side)
        patch(host, "all_gather", gathering)
        patch(comm.between, "describe", describing)
        for check in (False, False, True):
            comm.check, described = check, 0
            y = fc.all_gather(torch.full((2,), float(rank)))
            assert y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
            found.append(described)
        comm.check = False
        checker = Checker(comm)
        for shape in ((5, 3), (0, 2)):
            checker.every_op(shape)
        checker.finish()
    # Beside the own domain's part something crosses, beside the other's nothing.
    assert left[:2] == [crossing.CROSSING_PROGRAMS, 0] and side.left == 0
    return tuple(found)


def test_what_crosses_in_the_order_of_a_stream(pools: Pools) -> None:
    for found in pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(check_on_stream, timeout_s=100):
        assert found == (1, 0, 1)


def reached(rank: int, obstacles: list[str | None], copies: list[bool]) -> Domain:
    with fc.Communicator.of(channel=f"reach {obstacles} {copies}") as comm:
        assert comm.between is not None
        domain = comm.between.domain
        side = SimpleNamespace(domain=Domain(obstacles[domain], copies[domain]))
        with mock.patch.object(fc.Communicator, "gpu", lambda self, device: side):
            found = comm.reach(GPU)
            assert comm.reach(GPU) is found
        comm.barrier()
        return found


def test_all_domains_come_to_the_same_answer(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    for obstacles, copies, expected in (
        ([None, None], [True, True], Domain(None, copies=True)),
        ([None, None], [True, False], Domain(None, copies=False)),
        ([None, "no peer access"], [True, False], Domain("in domain 1, no peer access", False)),
        (["a", "b"], [False, False], Domain("in domain 0, a", copies=False)),
    ):
        assert pool.run(reached, obstacles, copies) == [expected] * 4


def differ(rank: int) -> str:
    comm = fc.Communicator.of()
    side = SimpleNamespace(domain=Domain(None, copies=True))
    with (
        mock.patch.object(fc.Communicator, "gpu", lambda self, device: side),
        pytest.raises(fc.MismatchError) as caught,
    ):
        if rank < 2:
            comm.reach(GPU)
        else:
            fc.all_reduce(torch.ones(2))
    return str(caught.value)


def test_a_domain_that_is_elsewhere_is_no_answer(pools: Pools) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    for said in pool.run(differ):
        assert "what its GPUs allow" in said and "all_reduce" in said
    pool.restart()
