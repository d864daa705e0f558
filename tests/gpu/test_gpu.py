"""The checks on a GPU, one test each. ``make gpu-check`` runs them without pytest, and measures."""

from __future__ import annotations

from functools import cache

import pytest

from tests.gpu.checks import CHECKS
from tests.gpu.running import Result, lacking, run

REASON = lacking()


@cache
def results(world_size: int) -> dict[str, Result]:
    """All checks on so many ranks, on one device; started once."""
    return {result.name: result for result in run(CHECKS, world_size)}


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world_size", [2, 1, 4])
def test_gpu(world_size: int, name: str) -> None:
    problem = results(world_size)[name].problem
    assert not problem, problem
