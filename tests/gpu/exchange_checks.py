"""What is checked of the collectives; see ``checks``."""

from __future__ import annotations

from typing import Any

import torch

import fusedcomm as fc
from tests.gpu.common import DEVICE, captured, comm_of, settle

ALGORITHMS = ("one_shot", "two_shot", "ring")
SIZES = (7, 5000)
REPLAYS = 6


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(DEVICE, dtype)


def collectives(rank: int, world_size: int) -> None:
    """Every collective, exactly; of all-reduce every algorithm that any GPU has."""
    comm = comm_of("collectives")
    options: dict[str, Any] = {"group": comm, "engine": "triton"}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            xs = [whole(10 * size + r, size, dtype=dtype) for r in range(world_size)]
            x, total = xs[rank], torch.stack(xs).float().sum(0).to(dtype)
            for algorithm in ALGORITHMS:
                y = fc.all_reduce(x, algorithm=algorithm, **options)
                assert torch.equal(y, total), (algorithm, size, dtype)
                out = x.clone()
                fc.all_reduce(out, algorithm=algorithm, out=out, **options)
                assert torch.equal(out, total), ("in place", algorithm, size, dtype)
            assert torch.equal(fc.all_gather(x, **options), torch.cat(xs))
            parts = [*total.chunk(world_size), *[total[:0]] * world_size]
            assert torch.equal(fc.reduce_scatter(x, **options), parts[rank])
            assert torch.equal(fc.broadcast(x, world_size - 1, **options), xs[-1])
            sent = [(rank + peer) % 3 for peer in range(world_size)]  # from and to each alike
            rows = [whole(100 * rank + peer, sent[peer], 33) for peer in range(world_size)]
            got = fc.all_to_all(torch.cat(rows), send_counts=sent, recv_counts=sent, **options)
            right = [whole(100 * peer + rank, sent[peer], 33) for peer in range(world_size)]
            assert torch.equal(got, torch.cat(right))
    settle()
    comm.close()


def graph_of_collectives(rank: int, world_size: int) -> None:
    """All-reduces of every algorithm and an all-gather, replayed with new data."""
    comm = comm_of("graph of collectives")
    options: dict[str, Any] = {"group": comm, "engine": "triton"}
    x = torch.zeros(1000, device=DEVICE)

    def calls() -> list[torch.Tensor]:
        found = [fc.all_reduce(x, algorithm=name, **options) for name in ALGORITHMS]
        return [*found, fc.all_gather(x, **options)]

    calls()
    replay, found = captured(comm, calls)
    for number in range(REPLAYS):
        xs = [whole(7 * number + r, 1000) for r in range(world_size)]
        x.copy_(xs[rank])
        replay()
        for y in found[:-1]:
            assert torch.equal(y, sum(xs[1:], xs[0])), f"replay {number}"
        assert torch.equal(found[-1], torch.cat(xs)), f"replay {number}"
        if number % 3 == 0:
            calls()
    settle()
    comm.close()


CHECKS = (collectives, graph_of_collectives)
