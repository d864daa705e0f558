"""The collectives' kernels, run by the interpreter, against what one process computes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fusedcomm as fc
from fusedcomm.planning import exchanges
from tests.conftest import Pools
from tests.ranks.collective_calls import HALVES, INTEGERS, Checker

SHAPES = ((8,), (3, 5), (0, 4), (7, 2, 3), (1,), (3, 700))
ALGORITHMS = ("one_shot", "two_shot", "ring")


def check(rank: int, window_bytes: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    with mock.patch.object(exchanges, "WINDOW_BYTES", window_bytes):
        checker = Checker(fc.Communicator.of(), "triton")
        for shape in shapes:
            checker.every_op(shape)
        checker.finish()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shapes(pools: Pools, world_size: int) -> None:
    shapes = SHAPES if world_size < 4 else SHAPES[:3]
    pools(world_size, TRITON_INTERPRET="1").run(check, 1 << 26, shapes, timeout_s=240)


def test_windows(pools: Pools) -> None:
    """Tensors that do not fit into a slot go through it window by window."""
    pools(3, TRITON_INTERPRET="1").run(check, 64, ((0, 4), (7, 2, 3)), timeout_s=240)


def check_algorithms(rank: int) -> None:
    checker = Checker(fc.Communicator.of(), "triton")
    for algorithm in ALGORITHMS:
        for size in (0, 5, 2000):
            checker.all_reduce((size,), torch.float32, "sum", algorithm)
        checker.all_reduce((300,), torch.bfloat16, "avg", algorithm)
        checker.all_reduce((70,), torch.int32, "max", algorithm)
    checker.finish()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_algorithms(pools: Pools, world_size: int) -> None:
    pools(world_size, TRITON_INTERPRET="1").run(check_algorithms, timeout_s=240)


def check_dtypes(rank: int) -> None:
    checker = Checker(fc.Communicator.of(), "triton")
    for dtype in (*HALVES, *INTEGERS, torch.bool):
        for op in ("max", "min") if dtype == torch.bool else ("sum", "min"):
            checker.all_reduce((11,), dtype, op)
            checker.reduce_scatter((5,), 0, dtype, op)
        checker.all_gather((5,), 0, dtype)
        checker.all_to_all((2,), 1, dtype)
        checker.broadcast((3,), 0, dtype)
    for algorithm in ALGORITHMS:
        x = torch.tensor([1.0, float("nan") if rank else 2.0])
        y = fc.all_reduce(x, op="max", algorithm=algorithm, engine="triton")
        assert y[0] == 1 and y[1].isnan(), y
    checker.finish()


def test_dtypes(pools: Pools) -> None:
    pools(2, TRITON_INTERPRET="1").run(check_dtypes, timeout_s=240)


def refused(rank: int) -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="has no kernel"):
        fc.all_reduce(x, algorithm="halving_doubling", engine="triton")
    with pytest.raises(ValueError, match="multicast"):
        fc.all_reduce(x, algorithm="multimem", engine="triton")
    with pytest.raises(ValueError, match="it is a kernel"):
        fc.all_reduce(x, algorithm="multimem", engine="host")
    assert torch.equal(fc.all_reduce(x, engine="triton"), 2 * x)


def test_what_cannot_be_had_is_refused_before_anything_is_sent(pools: Pools) -> None:
    pools(2, TRITON_INTERPRET="1").run(refused)
