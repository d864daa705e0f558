"""The checks for GPUs, on CPU ranks: they themselves are right, and find what is wrong."""

from __future__ import annotations

import pytest
import torch

from fusedcomm.testing import RankError
from fusedcomm.testing.races.recording import replaced
from tests.gpu import checks, expert_checks, layer_checks

NEEDS_A_GPU = {"auto_takes_triton", "growth_during_capture", "two_streams", "timeout_record"}
#: The matrix of every dtype runs in test_tensor_parallel.py as well.
LONG = {"float16", "float32", "pieces", "copy_engine"}


def _few_rounds(rank: int, world_size: int, name: str) -> None:
    with (
        replaced(checks, ROUNDS=5, REPLAYS=4),
        replaced(expert_checks, REPLAYS=4, ROUNDS=9),
        replaced(layer_checks, REPLAYS=2),
    ):
        checks.CHECKS[name](rank, world_size)


def _wrong_result(rank: int, world_size: int, name: str) -> None:
    """The last element of every result of rank 1 is wrong."""
    calls = checks.Model.calls

    def spoiled(self: checks.Model, layers: int = 1) -> list[torch.Tensor]:
        found = calls(self, layers)
        if rank == 1:
            found[-1].view(-1)[-1] += 1
        return found

    with replaced(checks.Model, calls=spoiled):
        _few_rounds(rank, world_size, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU, in tests/gpu")
@pytest.mark.parametrize("name", [n for n in checks.CHECKS if n not in NEEDS_A_GPU | LONG])
def test_a_check_passes(pools, name):
    ranks = 4 if name.startswith("domains") else 2
    pools(ranks, TRITON_INTERPRET="1").run(_few_rounds, ranks, name, timeout_s=150)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU, in tests/gpu")
@pytest.mark.parametrize("name", ["skew", "graph_mixed_with_eager"])
def test_a_check_fails(pools, name):
    with pytest.raises(RankError, match="differ|are wrong"):
        pools(2, TRITON_INTERPRET="1").run(_wrong_result, 2, name, timeout_s=150)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU, in tests/gpu")
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("name", ["graph_of_experts", "graph_of_dropping"])
def test_graphs_of_experts_on_other_numbers_of_ranks(pools, name, world_size):
    pools(world_size, TRITON_INTERPRET="1").run(_few_rounds, world_size, name, timeout_s=150)
