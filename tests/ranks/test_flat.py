"""Layers share one communicator, and neither building them nor using them makes memory grow."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fusedcomm as fc
from fusedcomm.communicator import Communicator
from tests.conftest import Pools
from tests.ranks.dtensor_models import mesh_of

#: Rounds before the first look: allocators, caches and workspaces have their size by then.
WARM, ROUNDS = 200, 1000
FEATURES = 16


class Held(NamedTuple):
    """What this process holds: descriptors, mappings, and resident memory in bytes."""

    descriptors: int
    mappings: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _ in maps)
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return cls(len(os.listdir("/proc/self/fd")), mappings, pages * os.sysconf("SC_PAGE_SIZE"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.gate = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def built(mesh: object) -> Block:
    block = Block()
    plan = {
        "": fc.FusedGatherParallel(("gate", "up"), input_layouts=Shard(0)),
        "norm": fc.FusedSequenceParallel(sequence_dim=0, use_local_output=True),
        "down": fc.FusedRowwiseParallel(output_layouts=Shard(0)),
    }
    return fc.parallelize_module(block, mesh, plan)  # type: ignore


def check_flat(work: Callable[[], None]) -> None:
    for _ in range(WARM):
        work()
    first = Held.now()
    for _ in range(ROUNDS - WARM):
        work()
    last = Held.now()
    assert last.descriptors <= first.descriptors, f"{first} -> {last}"
    assert last.mappings <= first.mappings + 8, f"{first} -> {last}"
    # 800 rounds: 4 KiB that stay of each are found.
    assert last.resident <= first.resident + 3 * 2**20, f"{first} -> {last}"


def check_builds(rank: int) -> None:
    mesh = mesh_of()

    def build() -> None:
        block = built(mesh)
        comms = {id(layer.layouts.comm) for layer in (block.gate, block.up, block.down)}
        fc.nn.GatedMLP(FEATURES, 2 * FEATURES, group=mesh)
        assert comms == {id(Communicator.of(mesh))}

    check_flat(build)
    assert len(Communicator.live()) == 1


def check_steps(rank: int) -> None:
    block = built(mesh_of())
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    x = torch.randn(4, FEATURES)

    def step() -> None:
        block(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    check_flat(step)


@pytest.mark.parametrize("work", [check_builds, check_steps])
def test_memory_is_flat(pools: Pools, work: Callable[[int], None]) -> None:
    pool = pools(2)
    pool.restart()  # with no communicators of other tests
    pool.run(work, timeout_s=200)
