"""The kernels themselves, in Triton's interpreter, over the matrix of the host engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import Pools
from tests.ranks.cases import CUTS_TOKENS, OPS, Case
from tests.ranks.checking import MAX_PIECES, check, check_planned
from tests.ranks.test_tensor_parallel import matrix

#: What the kernels take.
CASES = [case for case in matrix("triton") if case.dtype != torch.float64]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_matrix(pools: Pools, world_size: int) -> None:
    # A step is milliseconds in the interpreter: every world size takes its share of the matrix.
    cases = CASES[world_size - 1 :: 4]
    pools(world_size, TRITON_INTERPRET="1").run(check, cases, timeout_s=150)


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces(pools: Pools, world_size: int) -> None:
    plan = {"min_chunk_rows": 1, "one_shot_bytes": 0, "pieces": MAX_PIECES}
    cases = [case for case in CASES if case.dtype == torch.float32][world_size::8]
    pools(world_size, TRITON_INTERPRET="1").run(check_planned, cases, plan, timeout_s=150)


@pytest.mark.parametrize("world_size", [2, 3])
def test_copies(pools: Pools, world_size: int) -> None:
    """Rows carried beside the kernels, as by copy engines."""
    moving = [case for case in CASES if case.op in CUTS_TOKENS and not case.options]
    cases = moving[world_size::14]
    plan = {"pieces": MAX_PIECES, "copies": True}
    pools(world_size, TRITON_INTERPRET="1").run(check_planned, cases, plan, timeout_s=150)


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_tiles(pools: Pools, world_size: int) -> None:
    """More than one tile each way, and none of the extents a multiple of a tile's."""
    cases = [Case(op, (150,), k=130, n=140, engine="triton") for op in OPS]
    cases += [replace(case, dtype=torch.bfloat16) for case in cases]
    pools(world_size, TRITON_INTERPRET="1").run(check, cases, timeout_s=150)
