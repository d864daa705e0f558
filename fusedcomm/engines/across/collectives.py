"""Collectives of a group of several domains: every engine's, in two levels.

Inside a domain they are the functions of the plan's engine; see ``levels`` for what crosses.

With N domains of g ranks, n = N g and a full tensor of S bytes; every byte crosses a border once:

============== =================================================== =============================
operation      steps                                               bytes a rank sends across
============== =================================================== =============================
all_reduce     reduce-scatter inside; reduce-scatter and           2 (N-1)/N S/g
               all-gather across, of the own chunk; all-gather
               inside
all_gather     own shard across | own domain inside; then each     (N-1)/N S/g
               other domain's shards inside
reduce_scatter for each other domain inside; across | for the      (N-1)/N S/g
               own domain inside; add the domains' sums
all_to_all     inside, to the rank in the receiver's place;        (N-1)/N of its own tensor
               across
broadcast      across among the ranks in src's place; inside       src: (N-1) S
============== =================================================== =============================

What stands on both sides of ``|`` goes on at the same time. Sums are rounded to the tensor's dtype
inside and again across; they are equal on all ranks and from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.engines.across.levels import Levels, elements
from fusedcomm.engines.combining import combine
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.planning.collectives import Plan
from fusedcomm.schedule import shard_bounds, successors

Bounds = list[tuple[int, int]]


def all_reduce(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    """``out = reduction over ranks of x``, bitwise equal on every rank; both flat."""
    with comm.collective(plan.text):
        levels, ops = _levels(comm, plan, "all_reduce")
        inside, mine = levels.inside, levels.mine
        chunks = shard_bounds(x.numel(), inside.world_size)
        first, last = chunks[inside.rank]
        chunk = x.new_empty(last - first)
        levels.agree()
        ops.reduce_scatter(
            inside, _step(plan, "reduce"), x.view(1, -1), chunk.view(1, -1), chunks, reduction
        )
        parts = shard_bounds(chunk.numel(), len(levels.domains))
        sizes = [stop - start for start, stop in parts]
        own = chunk[slice(*parts[mine])]
        others = [chunk[slice(*part)] for domain, part in enumerate(parts) if domain != mine]
        sends = [0 if domain == mine else size for domain, size in enumerate(sizes)]
        takes = [0 if domain == mine else sizes[mine] for domain in range(len(sizes))]
        came = levels.begin("reduce across", torch.cat(others), sends, takes).finish()
        came[mine] = own.clone()
        combine(came, [own], reduction, len(sizes) if reduction == "avg" else 1)
        came = levels.spread("gather across", own, sizes).finish()
        for domain, (start, stop) in enumerate(parts):
            if domain != mine:
                chunk[start:stop].copy_(came[domain])
        ops.all_gather(inside, _step(plan, "gather"), chunk.view(1, -1), out.view(1, -1), chunks)


def all_gather(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds) -> None:
    """``out[:, bounds[r]] = x of rank r``."""
    with comm.collective(plan.text):
        levels, ops = _levels(comm, plan, "all_gather")
        outer = x.shape[0]
        widths = [_width(bounds[rank]) for rank in levels.counterparts]
        levels.agree()
        crossing = levels.spread("across", x, [outer * width for width in widths])
        for domain in (levels.mine, *successors(levels.mine, len(levels.domains))):
            if domain == levels.mine:
                shard = x
            else:
                if domain == (levels.mine + 1) % len(levels.domains):
                    came = crossing.finish()
                shard = came[domain].view(outer, widths[domain])
            ranks = levels.domains[domain]
            inner = _side_by_side(bounds, ranks)
            together = _together(bounds, ranks)
            target = out[:, slice(*together)] if together else x.new_empty(outer, inner[-1][1])
            step = _step(plan, f"domain {domain}")
            ops.all_gather(levels.inside, step, shard, target, inner)
            if together is None:
                for rank, columns in zip(ranks, inner, strict=True):
                    out[:, slice(*bounds[rank])].copy_(target[:, slice(*columns)])


def reduce_scatter(
    comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds, reduction: str
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``, domain by domain in their order."""
    with comm.collective(plan.text):
        levels, ops = _levels(comm, plan, "reduce_scatter")
        mine, number = levels.mine, len(levels.domains)
        outer = x.shape[0]
        levels.agree()

        def reduce_for(domain: int) -> Tensor:
            ranks = levels.domains[domain]
            together = _together(bounds, ranks)
            if together:
                part = x[:, slice(*together)]
            else:
                part = torch.cat([x[:, slice(*bounds[rank])] for rank in ranks], 1)
            own = x.new_empty(outer, _width(bounds[levels.counterparts[domain]]))
            step = _step(plan, f"for domain {domain}")
            inner = _side_by_side(bounds, ranks)
            ops.reduce_scatter(levels.inside, step, part, own, inner, reduction)
            return own

        sums = {domain: reduce_for(domain).view(-1) for domain in successors(mine, number)}
        sums[mine] = x.new_empty(0)
        sends = [sums[domain].numel() for domain in range(number)]
        takes = [0 if domain == mine else out.numel() for domain in range(number)]
        sent = torch.cat([sums[domain] for domain in range(number)])
        crossing = levels.begin("across", sent, sends, takes)
        own = reduce_for(mine)
        parts = [part.view(out.shape) if part.numel() else part for part in crossing.finish()]
        parts[mine] = own
        if out.numel():
            combine(parts, [out], reduction, number if reduction == "avg" else 1)


def all_to_all(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    out: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
) -> None:
    """``out`` is the concatenation of the rows that every rank has for this one.

    A row goes first to the rank of its own domain that is in the receiver's place, then across.
    """
    with comm.collective(plan.text):
        levels, ops = _levels(comm, plan, "all_to_all")
        inside = levels.inside
        rank, world_size = comm.rank, comm.world_size
        levels.agree()
        if send_counts is None or recv_counts is None:
            counts = [[x.shape[0] // world_size] * world_size] * world_size
        else:
            counts = _counts(levels, plan, send_counts, recv_counts)
        own, places = levels.domains[levels.mine], list(zip(*levels.domains, strict=True))

        # Inside: for every place the rows for all ranks in it, domain after domain.
        parts = x.split(counts[rank])
        sent = torch.cat([parts[to] for place in places for to in place])
        sends = [sum(counts[rank][to] for to in place) for place in places]
        takes = [sum(counts[source][to] for to in levels.counterparts) for source in own]
        relayed = x.new_empty(sum(takes), x.shape[1])
        ops.all_to_all(inside, _step(plan, "inside"), sent, relayed, sends, takes)

        # Across: for every domain the rows that came from all ranks of this one.
        blocks = [
            block.split([counts[source][to] for to in levels.counterparts])
            for source, block in zip(own, relayed.split(takes), strict=True)
        ]
        by_domain = [torch.cat([block[domain] for block in blocks])
                     for domain in range(len(levels.domains))]  # fmt: skip
        stays = by_domain[levels.mine]
        by_domain[levels.mine] = x.new_empty(0, x.shape[1])
        inner = x.shape[1]
        sends = [block.numel() for block in by_domain]
        rows = [sum(counts[source][rank] for source in ranks) for ranks in levels.domains]
        takes = [count * inner for count in rows]
        takes[levels.mine] = 0
        came = levels.begin("across", torch.cat(by_domain).view(-1), sends, takes).finish()
        came[levels.mine] = stays.view(-1)

        # Each domain's rows lie in the order of its ranks; out is in the order of all ranks.
        targets = out.split([counts[source][rank] for source in range(world_size)])
        for domain, ranks in enumerate(levels.domains):
            pieces = came[domain].view(rows[domain], inner)
            split = pieces.split([counts[source][rank] for source in ranks])
            for source, piece in zip(ranks, split, strict=True):
                targets[source].copy_(piece)


def broadcast(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, src: int) -> None:
    """``out = x of src``; both flat. What x holds elsewhere does not matter."""
    with comm.collective(plan.text):
        levels, ops = _levels(comm, plan, "broadcast")
        inside, topology = levels.inside, comm.topology
        origin, place = topology.domain_of(src), topology.local_rank(src)
        if comm.rank == src and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        levels.agree()
        with inside.collective(levels.named("across")):
            if inside.rank == place and out.numel():
                data = elements(out)
                inside.torch.run(levels.op, lambda: levels.between.broadcast(data, origin))
        ops.broadcast(inside, _step(plan, "inside"), out, out, place)


def _levels(comm: Communicator, plan: Plan, op: str) -> tuple[Levels, ModuleType]:
    """Within the call: its levels, and the engine's collectives of one domain."""
    return Levels(comm, plan.text, op), operations_of(plan.engine, "collectives")


def _counts(
    levels: Levels, plan: Plan, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> list[list[int]]:
    """``counts[a][b]``: how many rows rank a has for rank b, all ranks' views compared."""
    world_size = levels.comm.world_size
    both = 2 * world_size
    mine = torch.tensor([[*send_counts, *recv_counts]])
    counts = mine.new_empty(1, world_size * both)
    bounds = [(rank * both, (rank + 1) * both) for rank in range(world_size)]
    all_gather(levels.comm, replace(plan, text=f"{plan.text}: counts"), mine, counts, bounds)
    return check_all_counts(counts.view(world_size, both).tolist())


def _step(plan: Plan, step: str) -> Plan:
    """The plan of a call inside the domain; its text is as ``Levels.named`` has it."""
    return replace(plan, text=f"{plan.text}: {step}", algorithm="direct")


def _together(bounds: Bounds, ranks: Sequence[int]) -> tuple[int, int] | None:
    """The columns of these ranks, if they lie side by side."""
    start, stop = bounds[ranks[0]][0], bounds[ranks[-1]][1]
    return (start, stop) if stop - start == sum(_width(bounds[rank]) for rank in ranks) else None


def _side_by_side(bounds: Bounds, ranks: Sequence[int]) -> Bounds:
    """Where these ranks' columns lie in a tensor that has no others."""
    found: Bounds = []
    for rank in ranks:
        start = found[-1][1] if found else 0
        found.append((start, start + _width(bounds[rank])))
    return found


def _width(bound: tuple[int, int]) -> int:
    return bound[1] - bound[0]
