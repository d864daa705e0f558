"""Workspaces while a CUDA graph is captured, with a stand-in for the capture."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fusedcomm as fc
from fusedcomm.protocol import Space
from tests.conftest import Pools

CPU = torch.device("cpu")
SMALL, LARGE = Space("gather", 1, 4096, 1), Space("gather", 1, 8192, 2)


def check(rank: int) -> None:
    comm = fc.Communicator.of(channel="captures")

    def grown(space: Space) -> object:
        with comm.collective(f"a call with {space}"):
            return comm.memory.workspace(space, CPU)

    with mock.patch("fusedcomm.communicator.memory.is_capturing", lambda: True):
        with pytest.raises(ValueError, match="Communicator.reserve"):
            comm.memory.require_room(SMALL, CPU)  # nothing is there yet
    comm.memory.require_room(LARGE, CPU)
    first = grown(SMALL)
    with mock.patch("fusedcomm.communicator.memory.is_capturing", lambda: True):
        comm.memory.require_room(SMALL, CPU)
        for larger in (LARGE, SMALL._replace(chunks=2)):
            with pytest.raises(ValueError, match="'gather' would have to grow"):
                comm.memory.require_room(larger, CPU)
    comm.require_usable()
    # A graph keeps its memory when eager calls outgrow it; what no graph was captured on goes.
    first.captured = True  # type: ignore[attr-defined]
    second = grown(LARGE)
    assert second is not first and comm.memory.outgrown == [first]
    assert grown(SMALL) is second
    grown(LARGE._replace(region_bytes=16384))
    assert comm.memory.outgrown == [first]
    comm.close()
    assert comm.memory.outgrown == []


def test_growth_and_captured_memory(pools: Pools) -> None:
    pools(2).run(check)
