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

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines import operations_of
from fusedcomm.engines.across.levels import Levels, elements, two_levels
from fusedcomm.engines.across.parts import Bounds, width
from fusedcomm.engines.combining import combine
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.gpu import refuse_counts
from fusedcomm.planning.collectives import Plan
from fusedcomm.schedule import shard_bounds


def all_reduce(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, reduction: str) -> None:
    """``out = reduction over ranks of x``, bitwise equal on every rank; both flat."""
    ops = operations_of(plan.engine, "collectives")
    with two_levels(comm, plan.text, "all_reduce", x.device) as levels:
        inside, mine = levels.inside, levels.mine
        chunks = shard_bounds(x.numel(), inside.world_size)
        chunk = x.new_empty(width(chunks[inside.rank]))
        ops.reduce_scatter(
            inside, _step(plan, "reduce"), x.view(1, -1), chunk.view(1, -1), chunks, reduction
        )
        parts = shard_bounds(chunk.numel(), len(levels.domains))
        sizes = [width(part) for part in parts]
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
    with two_levels(comm, plan.text, "all_gather", x.device) as levels:
        gather_columns(levels, plan, x, out, bounds)


def gather_columns(levels: Levels, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds) -> None:
    """Within a call: ``all_gather``."""
    ops = operations_of(plan.engine, "collectives")
    for domain, part, shard in levels.shards("across", x, bounds, 1):
        place = part.place(out)
        ops.all_gather(levels.inside, _step(plan, f"domain {domain}"), shard, place, part.inner)
        part.put(out, place)


def reduce_scatter(
    comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds, reduction: str
) -> None:
    """``out = reduction over ranks of x[:, bounds[rank]]``, domain by domain in their order."""
    ops = operations_of(plan.engine, "collectives")
    with two_levels(comm, plan.text, "reduce_scatter", x.device) as levels:

        def reduce_for(domain: int) -> Tensor:
            part = levels.part(bounds, domain, 1)
            own = x.new_empty(x.shape[0], width(bounds[levels.counterparts[domain]]))
            step = _step(plan, f"for domain {domain}")
            ops.reduce_scatter(levels.inside, step, part.of(x), own, part.inner, reduction)
            return own

        sums = levels.sums("across", out.numel(), reduce_for)
        combine(sums, [out], reduction, len(sums) if reduction == "avg" else 1)


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
    ops = operations_of(plan.engine, "collectives")
    equal = send_counts is None or recv_counts is None
    if not equal:
        refuse_counts()
    with two_levels(comm, plan.text, "all_to_all", x.device) as levels:
        inside = levels.inside
        rank, world_size = comm.rank, comm.world_size
        if send_counts is None or recv_counts is None:
            counts = [[x.shape[0] // world_size] * world_size] * world_size
        else:
            counts = _counts(levels, plan, x.device, send_counts, recv_counts)
        own, places = levels.domains[levels.mine], list(zip(*levels.domains, strict=True))

        # Inside: for every place the rows for all ranks in it, domain after domain.
        parts = x.split(counts[rank])
        sent = torch.cat([parts[to] for place in places for to in place])
        sends = [sum(counts[rank][to] for to in place) for place in places]
        takes = [sum(counts[source][to] for to in levels.counterparts) for source in own]
        relayed = x.new_empty(sum(takes), x.shape[1])
        told = (None, None) if equal else (sends, takes)
        ops.all_to_all(inside, _step(plan, "inside"), sent, relayed, *told)

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
    ops = operations_of(plan.engine, "collectives")
    with two_levels(comm, plan.text, "broadcast", x.device) as levels:
        inside, topology = levels.inside, comm.topology
        origin, place = topology.domain_of(src), topology.local_rank(src)
        if comm.rank == src and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        with inside.collective(levels.named("across")):
            if inside.rank == place and out.numel():
                data = elements(out)
                inside.torch.run(levels.op, lambda: levels.between.broadcast(data, origin))
        ops.broadcast(inside, _step(plan, "inside"), out, out, place)


def _counts(
    levels: Levels,
    plan: Plan,
    device: torch.device,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
) -> list[list[int]]:
    """``counts[a][b]``: how many rows rank a has for rank b, all ranks' views compared."""
    world_size = levels.comm.world_size
    both = 2 * world_size
    mine = torch.tensor([[*send_counts, *recv_counts]], device=device)
    counts = mine.new_empty(1, world_size * both)
    bounds = [(rank * both, (rank + 1) * both) for rank in range(world_size)]
    gather_columns(levels, _step(plan, "counts"), mine, counts, bounds)
    return check_all_counts(counts.view(world_size, both).tolist())


def _step(plan: Plan, step: str) -> Plan:
    """The plan of a call inside the domain; its text is as ``Levels.named`` has it."""
    return replace(plan, text=f"{plan.text}: {step}", algorithm="direct")
