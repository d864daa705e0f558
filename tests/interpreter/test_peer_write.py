"""The kernel by which ``doctor`` finds out whether GPUs write each other's memory."""

from __future__ import annotations

import torch

from fusedcomm.cli.doctor.gpus import pattern_arrived, write_pattern
from tests.conftest import Pools


def write(rank: int) -> None:
    words = torch.zeros(64 + 2, dtype=torch.int32)
    target = words[1:-1]
    assert not pattern_arrived(target, 1003)
    write_pattern(target, 1003)
    assert pattern_arrived(target, 1003) and not pattern_arrived(target, 1004)
    assert words[0] == words[-1] == 0  # nothing beside it


def test_words_arrive_through_an_address(pools: Pools) -> None:
    pools(1, TRITON_INTERPRET="1").run(write)
