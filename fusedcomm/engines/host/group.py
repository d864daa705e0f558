"""Gather and reduce-scatter of a whole group, be it one domain or several.

Over several domains, what overlaps inside a domain is ``gather`` and ``reduce_scatter`` of that
domain; torch.distributed carries the rest between ranks of the same place in their domains, while
the own domain's part is computed. With N domains of g ranks and a full tensor of S bytes::

    gather          own shard to the N-1 counterparts       | own domain's rows
                    then, inside, every other domain's rows, of which a counterpart's lie here

    reduce-scatter  inside, every other domain's rows       | then across: each counterpart's sums
                    own domain's rows                       |
                    then the N sums are added, in the order of domains

Every byte crosses a border once: (N-1)/N of S/g in each direction for either, so 2 (N-1)/N S/g for
an all-reduce, which is both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedcomm.between import Between
from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.levels import agree, as_bytes, finish
from fusedcomm.engines.combining import add_in_order
from fusedcomm.engines.host import gather as domain_gather
from fusedcomm.engines.host.gather import describe
from fusedcomm.engines.host.scatter import Partial
from fusedcomm.engines.host.scatter import reduce_scatter as domain_reduce_scatter
from fusedcomm.schedule import successors
from fusedcomm.trace import span
from fusedcomm.waiting import Pending

Bounds = list[tuple[int, int]]


def gather(
    comm: Communicator, op: str, shard: torch.Tensor, bounds: Bounds, pieces: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """``engines.host.gather.gather`` for a group of one domain or several: own rows first."""
    if comm.inside is None or comm.between is None:
        yield from domain_gather.gather(comm, op, shard, bounds, pieces)
        return
    inside, between = comm.inside, comm.between
    ranges = [[bounds[rank] for rank in ranks] for ranks in comm.topology.domains]
    rows = [_rows(of_domain[inside.rank]) for of_domain in ranges]
    text, mine = comm.calls.text, between.domain
    equal = len(set(rows)) == 1
    cut = rows if equal else [0 if domain == mine else rows[domain] for domain in range(len(rows))]
    shard = shard.contiguous()
    received = shard.new_empty(sum(cut), shard.shape[1])
    crossing = None
    # Every rank of the domain opens the same calls, whether or not it has rows that cross.
    with inside.collective(f"{text}: rows cross"):
        agree(comm, op)
        if received.numel() or shard.numel():
            own = shard
            crossing = inside.torch.start(op, lambda: _spread(between, received, own, cut, equal))
    with inside.collective(f"{text}: own domain{describe(inside, shard)}"):
        yield from domain_gather.gather(inside, op, shard, ranges[mine], pieces)
    with inside.collective(f"{text}: rows arrive"):
        finish(comm, op, crossing)
    held = received.split(cut)
    for domain in successors(mine, between.domains):
        with inside.collective(f"{text}: from domain {domain}"):
            yield from domain_gather.gather(inside, op, held[domain], ranges[domain], pieces)


def reduce_scatter(
    comm: Communicator,
    op: str,
    partial: Partial,
    accumulate: Partial | None,
    *,
    bounds: Bounds,
    features: int,
    wire: torch.dtype,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    pieces: int,
) -> torch.Tensor:
    """``engines.host.scatter.reduce_scatter`` for a group of one domain or several.

    Over several, each domain's sum is rounded to ``wire`` before it crosses.
    """
    if comm.inside is None or comm.between is None:
        return domain_reduce_scatter(
            comm,
            op,
            partial,
            accumulate,
            bounds=bounds,
            features=features,
            wire=wire,
            dtype=dtype,
            bias=bias,
            pieces=pieces,
        )
    inside, between = comm.inside, comm.between
    ranges = [[bounds[rank] for rank in ranks] for ranks in comm.topology.domains]
    text, mine = comm.calls.text, between.domain
    with inside.collective(f"{text}: agree"):
        agree(comm, op)

    def reduce_inside(domain: int) -> torch.Tensor:
        with inside.collective(f"{text}: for domain {domain}"):
            return domain_reduce_scatter(
                inside,
                op,
                partial,
                accumulate,
                bounds=ranges[domain],
                features=features,
                wire=wire,
                dtype=wire,
                bias=None,
                pieces=pieces,
            )

    sums = {domain: reduce_inside(domain) for domain in successors(mine, between.domains)}
    sums[mine] = torch.empty(0, features, dtype=wire)
    sent = torch.cat([sums[domain] for domain in range(between.domains)])
    sent_rows = [sums[domain].shape[0] for domain in range(between.domains)]
    received_rows = [_rows(bounds[comm.rank])] * between.domains
    received_rows[mine] = 0
    received = sent.new_empty(sum(received_rows), features)
    crossing = None
    with inside.collective(f"{text}: sums cross"):
        if sent.numel() or received.numel():
            crossing = inside.torch.start(
                op,
                lambda: between.all_to_all(
                    as_bytes(received), as_bytes(sent), received_rows, sent_rows
                ),
            )
    sums[mine] = reduce_inside(mine)
    with inside.collective(f"{text}: sums arrive"):
        finish(comm, op, crossing)
    parts = list(received.split(received_rows))
    parts[mine] = sums[mine]
    with span("reduce", "add the domains' sums", rank=comm.rank):
        return add_in_order(parts, bias, dtype)


def _spread(
    between: Between, received: torch.Tensor, own: torch.Tensor, cut: list[int], equal: bool
) -> Pending:
    """Begin to give ``own`` to all counterparts and to take theirs, ``cut[d]`` rows of domain d."""
    if equal:
        return between.all_gather(as_bytes(received), as_bytes(own))
    # gloo gathers only equal sizes. Nothing is padded to them: padding would cross as well.
    copies = own.repeat(between.domains - 1, 1)
    sent = [0 if domain == between.domain else own.shape[0] for domain in range(between.domains)]
    return between.all_to_all(as_bytes(received), as_bytes(copies), cut, sent)


def _rows(bound: tuple[int, int]) -> int:
    return bound[1] - bound[0]
