"""What is checked of groups of several domains; see ``checks``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm as fc
from tests.gpu.common import DEVICE, LIMIT_S, captured, settle
from tests.gpu.exchange_checks import whole
from tests.gpu.expert_checks import EXPERTS, TOKENS, Mixture
from tests.ranks.cases import CUTS_TOKENS, Case
from tests.ranks.checking import check


def domains(rank: int, world_size: int) -> None:
    """Two domains, declared: kernels in each, and torch.distributed between them."""
    for backend, comm in _in_two(world_size, "domains"):
        _products(comm)
        _collectives(comm)
        if backend == "nccl":
            _graph(comm)


def domains_of_experts(rank: int, world_size: int) -> None:
    """The mixture of experts in two levels, forward and backward."""
    mixture = Mixture(rank, world_size)
    for _, comm in _in_two(world_size, "domains of experts"):
        for number in range(2):
            mixture.fill(number)
            mixture.check(mixture.calls(comm), number)
        x = torch.arange(TOKENS * 8, device=DEVICE).view(TOKENS, 8).float()
        ids = torch.arange(2 * TOKENS, device=DEVICE).view(TOKENS, 2) % EXPERTS
        d = fc.dispatch(x, ids, None, EXPERTS, group=comm, engine="triton", align=4)
        assert torch.equal(fc.combine(d.x, d), 2 * x)


def _in_two(world_size: int, channel: str) -> Iterator[tuple[str, fc.Communicator]]:
    """All ranks in two domains, if there are as many as make two of several ranks; in turn for all
    that carries GPU tensors between them."""
    half = world_size // 2
    if half < 2 or world_size % 2:
        return
    topology = [list(range(half)), list(range(half, 2 * half))]
    for backend, group in _groups(world_size).items():
        comm = fc.Communicator.of(
            group, channel=f"{channel}, {backend}", topology=topology, timeout_s=LIMIT_S
        )
        yield backend, comm
        settle()
        comm.close()


def _groups(world_size: int) -> dict[str, Any]:
    """By what carries GPU tensors between domains: NCCL, too, where every rank has its own GPU."""
    found: dict[str, Any] = {"gloo": None}
    if DEVICE == "cuda":
        numbers = [0] * world_size
        dist.all_gather_object(numbers, torch.cuda.current_device())
        if len(set(numbers)) == world_size:
            found["nccl"] = dist.new_group(backend="nccl")
    return found


def _products(comm: fc.Communicator) -> None:
    some = [Case(op, (37,), k=64, n=128) for op in (*CUTS_TOKENS, "linear_all_reduce")]
    some.append(Case("linear_reduce_scatter", (2,), k=64, n=128, values="ones"))
    given: dict[str, Any] = {"dtype": torch.bfloat16, "engine": "triton", "device": DEVICE}
    check(comm.rank, [replace(case, **given) for case in some], comm)


def _collectives(comm: fc.Communicator) -> None:
    rank, world_size = comm.rank, comm.world_size
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


def _graph(comm: fc.Communicator) -> None:
    """What NCCL carries is replayed as well, with new data."""
    x = torch.zeros(1000, device=DEVICE)

    def calls() -> list[torch.Tensor]:
        return [fc.all_gather(x, group=comm, engine="triton")]

    calls()
    replay, (found,) = captured(comm, calls)
    for number in range(4):
        xs = [whole(7 * number + r, 1000) for r in range(comm.world_size)]
        x.copy_(xs[comm.rank])
        replay()
        assert torch.equal(found, torch.cat(xs)), f"replay {number}"


CHECKS = (domains, domains_of_experts)
