"""Capacity, memory and reserved memory of the mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fusedcomm as fc
from tests.conftest import Pools

#: align, capacity.
LIMITS = ((1, 5), (4, 8), (4, 3), (1, 0))


def dropped(
    rank: int, engine: str, world_size: int, limits: Sequence[tuple[int, int]] = LIMITS
) -> list[int]:
    """Choices that find no room are as if they had no expert; how many, by case."""
    counts = []
    for align, capacity in limits:
        everyone = []
        for r in range(world_size):
            generator = torch.Generator().manual_seed(100 + r)
            everyone.append(torch.randint(-1, 4, (6, 2), generator=generator))
        # The rows of each expert, by a loop over sources, tokens and choices.
        rows, full = [0] * 4, [False] * world_size
        mine = everyone[rank].clone()
        block = -(-4 // world_size)
        for source, ids in enumerate(everyone):
            for token, choice in (ids >= 0).nonzero().tolist():
                expert = int(ids[token, choice])
                owner = expert // block
                rows[expert] += 1
                own = rows[owner * block : (owner + 1) * block]
                if full[owner] or sum(-(-n // align) * align for n in own) > capacity:
                    full[owner] = True
                    rows[expert] -= 1
                    if source == rank:
                        mine[token, choice] = -1
        x = torch.rand(6, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        options: dict[str, Any] = {"align": align, "capacity": capacity, "engine": engine}
        d = fc.dispatch(x, everyone[rank], None, 4, overflow="drop", **options)
        y = fc.combine(d.x * 2.0, d)
        taken = (mine >= 0).sum(1, keepdim=True)
        assert d.x.shape[0] == capacity
        assert int(d.dropped) == int((everyone[rank] >= 0).sum() - (mine >= 0).sum())
        assert d.counts.tolist() == rows[rank * block : (rank + 1) * block]
        torch.testing.assert_close(y, x * 2.0 * taken)
        y.sum().backward()
        torch.testing.assert_close(x.grad, (2.0 * taken).expand(6, 8))
        # moe_ffn drops and counts the same.
        generator, local = torch.Generator().manual_seed(7), len(d.counts)
        w13, w2 = (torch.rand(local, *s, generator=generator) for s in ((12, 8), (8, 6)))
        count, left = torch.tensor(-1), torch.tensor(-1)
        arguments = {"num_experts": 4, "overflow": "drop", **options}
        found = fc.moe_ffn(x, everyone[rank], None, w13, w2, dropped=count, **arguments)
        right = fc.moe_ffn(x, mine, None, w13, w2, dropped=left, **arguments)
        assert torch.equal(found, right) and torch.equal(count, d.dropped) and int(left) == 0
        # Another time the same call is an error, on every rank, and does no harm.
        if any(full):
            with pytest.raises(fc.CapacityError, match=f"but capacity is {capacity}"):
                fc.dispatch(x, everyone[rank], None, 4, **options)
        counts.append(int(d.dropped))
    return counts


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_what_finds_no_room_is_dropped_and_counted(
    pools: Pools, engine: str, world_size: int
) -> None:
    found = pools(world_size).run(dropped, engine, world_size)
    assert all(sum(counts) > 0 for counts in zip(*found, strict=True))


def workspace_bytes(rank: int, k: int) -> list[tuple[int, int]]:
    """Bytes held, and bytes by the formula, without and with limits."""
    hidden, experts, found = 256, 8, []
    for number, options in enumerate(({}, {"capacity": 128, "max_tokens": 32})):
        comm = fc.Communicator.of(channel=f"bytes {number} {k}")
        tokens = 24 - 8 * rank
        ids = (torch.arange(tokens * k) % experts).view(tokens, k)
        x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
        d = fc.dispatch(x, ids, None, experts, group=comm, **options)
        fc.combine(d.x, d)
        held = comm.workspace_bytes()
        world_size, local = comm.world_size, -(-experts // comm.world_size)
        totals = [(24 - 8 * r) * k for r in range(world_size)]
        most = max(
            sum(len([i for i in range(n) if i % experts // local == r]) for n in totals)
            for r in range(world_size)
        )
        received = options.get("capacity", most)
        sent = k * options.get("max_tokens", 24)
        data = 2 * hidden * 2 * (received + sent)
        # Flags: of each slot an epoch and a reader's word per rank, and one a piece and source.
        chunks = local * 4 + 1
        flags = 2 * 2 * (1 + world_size * (chunks + 1)) + (1 + 2 * world_size)
        counts = held.pop("moe counts")
        assert counts["data"] == world_size * 128  # rows of 4 · E bytes, in whole cache lines
        pages = [4096 * -(-128 * 2 * (1 + world_size * (chunks + 1)) // 4096)] * 2
        assert sum(kind["flags"] for kind in held.values()) == sum(pages)
        assert 128 * flags <= sum(pages) + counts["flags"]
        found.append((sum(kind["data"] for kind in held.values()), data))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_what_the_formula_says(pools: Pools, world_size: int) -> None:
    for k in (2, 4):
        for per_rank in pools(world_size).run(workspace_bytes, k):
            for held, formula in per_rank:
                assert held == formula


def reserved(rank: int) -> None:
    """After ``reserve`` no call within its limits grows anything."""
    comm = fc.Communicator.of(channel="reserved")
    comm.reserve("dispatch", (80, 16, 6), dtype=torch.bfloat16)
    comm.reserve("combine", (60, 16, 6), dtype=torch.bfloat16)
    before = dict(comm.memory.workspaces)
    held = comm.workspace_bytes()
    assert held["moe rows"]["data"] == 2 * 80 * 32 and held["moe returns"]["data"] == 2 * 60 * 32
    for tokens in (1, 20, 7):
        x = torch.ones(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        ids = (torch.arange(3 * tokens) % 6).view(tokens, 3)
        d = fc.dispatch(x, ids, None, 6, group=comm, capacity=80, max_tokens=20)
        fc.combine(d.x * 1.0, d).sum().backward()
    assert comm.memory.workspaces == before
    comm.close()


def test_reserved_memory_does_not_grow(pools: Pools) -> None:
    pools(2).run(reserved)
