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

from fusedcomm.communicator import Communicator
from fusedcomm.engines.across.levels import Levels
from fusedcomm.engines.across.parts import width
from fusedcomm.engines.combining import add_in_order
from fusedcomm.engines.host import gather as domain_gather
from fusedcomm.engines.host.gather import describe
from fusedcomm.engines.host.scatter import Partial
from fusedcomm.engines.host.scatter import reduce_scatter as domain_reduce_scatter
from fusedcomm.trace import span

Bounds = list[tuple[int, int]]


def gather(
    comm: Communicator, op: str, shard: torch.Tensor, bounds: Bounds, pieces: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """``engines.host.gather.gather`` for a group of one domain or several: own rows first."""
    if comm.inside is None or comm.between is None:
        yield from domain_gather.gather(comm, op, shard, bounds, pieces)
        return
    levels = Levels(comm, comm.calls.text, op)
    levels.agree()
    own = describe(levels.inside, shard)
    for domain, _, theirs in levels.shards("rows cross", shard, bounds, 0):
        step = f"from domain {domain}{own if domain == levels.mine else ''}"
        ranges = [bounds[rank] for rank in levels.domains[domain]]
        with levels.inside.collective(levels.named(step)):
            yield from domain_gather.gather(levels.inside, op, theirs, ranges, pieces)


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
    levels = Levels(comm, comm.calls.text, op)
    levels.agree()

    def reduce_inside(domain: int) -> torch.Tensor:
        with levels.inside.collective(levels.named(f"for domain {domain}")):
            return domain_reduce_scatter(
                levels.inside,
                op,
                partial,
                accumulate,
                bounds=[bounds[rank] for rank in levels.domains[domain]],
                features=features,
                wire=wire,
                dtype=wire,
                bias=None,
                pieces=pieces,
            )

    parts = levels.sums("sums cross", width(bounds[comm.rank]) * features, reduce_inside)
    with span("reduce", "add the domains' sums", rank=comm.rank):
        return add_in_order(parts, bias, dtype)
