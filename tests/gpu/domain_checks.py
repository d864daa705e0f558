"""What is checked of groups of several domains; see ``checks``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fusedcomm as fc
from tests.gpu.common import DEVICE, LIMIT_S, settle
from tests.gpu.exchange_checks import whole
from tests.ranks.cases import CUTS_TOKENS, Case
from tests.ranks.checking import check


def domains(rank: int, world_size: int) -> None:
    """Two domains, declared: kernels in each, and torch.distributed between them."""
    half = world_size // 2
    if half < 2:
        return
    topology = [list(range(half)), list(range(half, 2 * half))]
    comm = fc.Communicator.of(channel="domains", topology=topology, timeout_s=LIMIT_S)
    some = [Case(op, (37,), k=64, n=128) for op in (*CUTS_TOKENS, "linear_all_reduce")]
    some.append(Case("linear_reduce_scatter", (2,), k=64, n=128, values="ones"))
    check(
        rank,
        [replace(c, dtype=torch.bfloat16, engine="triton", device=DEVICE) for c in some],
        comm,
    )
    options: dict[str, Any] = {"group": comm, "engine": "triton"}
    for size in (7, 5000):
        xs = [whole(10 * size + r, size) for r in range(world_size)]
        x, total = xs[rank], torch.stack(xs).sum(0)
        assert torch.equal(fc.all_reduce(x, **options), total), size
        assert torch.equal(fc.all_gather(x, **options), torch.cat(xs)), size
        parts = [*total.chunk(world_size), *[total[:0]] * world_size]
        assert torch.equal(fc.reduce_scatter(x, **options), parts[rank]), size
        assert torch.equal(fc.broadcast(x, world_size - 1, **options), xs[-1]), size
        rows = [whole(100 * rank + peer, 2, 33) for peer in range(world_size)]
        got = fc.all_to_all(torch.cat(rows), **options)
        right = [whole(100 * peer + rank, 2, 33) for peer in range(world_size)]
        assert torch.equal(got, torch.cat(right)), size
    settle()
    comm.close()


CHECKS = (domains,)
