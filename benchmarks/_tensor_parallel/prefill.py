"""Many tokens: the op, the same in series, the bare product, and the ceiling of splitting it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

import fusedcomm as fc
from fusedcomm.benchmarks._tensor_parallel import inputs
from fusedcomm.benchmarks.harness import (
    MemoryUse,
    Options,
    Path,
    Prepared,
    Ranks,
    relative_bound,
)
from fusedcomm.engines.combining import add_in_order
from fusedcomm.protocol import SLOTS


def all_gather_linear(
    tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
) -> Prepared:
    """x [T/W, in] per rank, weight [out, in]; y [T, out]."""
    full = inputs.tokens(0, tokens, in_features, options.dtype)
    weight = inputs.weight(1 + ranks.rank, out_features, in_features, options.dtype)
    own = inputs.rows_of(ranks.rank, tokens, ranks.world_size)
    x = full[own].clone()
    expected = full.double() @ weight.double().t()
    bound = relative_bound(options.dtype, terms=in_features)
    buffer = full.clone()  # what the peers have sent is there already
    others = [
        inputs.rows_of((ranks.rank + step) % ranks.world_size, tokens, ranks.world_size)
        for step in range(1, ranks.world_size)
    ]

    def ceiling() -> torch.Tensor:
        buffer[own].copy_(x)
        y = x.new_empty(tokens, out_features)
        torch.mm(x, weight.t(), out=y[own])
        for rows in others:
            torch.mm(buffer[rows], weight.t(), out=y[rows])
        return y

    paths = {
        "GEMM alone": lambda: F.linear(full, weight),
        "overlapped": lambda: fc.all_gather_linear(
            x, weight, gathered_size=tokens, engine=options.engine
        ),
        "serial": lambda: F.linear(inputs.serial_all_gather(x, tokens), weight),
    }
    if ranks.world_size > 1:
        paths["ceiling"] = ceiling
    shard_rows = -(-tokens // ranks.world_size)
    return Prepared(
        {name: Path(run, expected, bound) for name, run in paths.items()},
        memory=lambda: _memory("gather", "shard", x, shard_rows * in_features),
    )


def linear_reduce_scatter(
    tokens: int, in_features: int, out_features: int, options: Options, ranks: Ranks
) -> Prepared:
    """x [T, in] and weight [out, in] per rank; y [T/W, out], this rank's rows of the sum."""
    world_size = ranks.world_size
    xs = [inputs.tokens(r, tokens, in_features, options.dtype) for r in range(world_size)]
    weights = [
        inputs.weight(world_size + r, out_features, in_features, options.dtype)
        for r in range(world_size)
    ]
    x, weight = xs[ranks.rank], weights[ranks.rank]
    own = inputs.rows_of(ranks.rank, tokens, world_size)
    products = [a[own].double() @ b.double().t() for a, b in zip(xs, weights, strict=True)]
    expected = torch.stack(products).sum(0)
    # Rounded once per rank on the wire and once at the end.
    bound = relative_bound(options.dtype, in_features * world_size, roundings=1 + world_size)
    peers = [(ranks.rank + step) % world_size for step in range(1, world_size)]
    received = {peer: products[peer].to(options.dtype) for peer in peers}  # is there already
    del products
    sent = torch.empty(tokens, out_features, dtype=options.dtype)

    def ceiling() -> torch.Tensor:
        for peer in peers:
            rows = inputs.rows_of(peer, tokens, world_size)
            torch.mm(x[rows], weight.t(), out=sent[rows])
        if world_size == 2:
            return torch.addmm(received[peers[0]], x[own], weight.t())
        parts = received | {ranks.rank: torch.mm(x[own], weight.t())}
        return add_in_order([parts[rank] for rank in range(world_size)], None, options.dtype)

    paths = {
        "GEMM alone": Path(lambda: F.linear(x, weight)),
        "overlapped": Path(
            lambda: fc.linear_reduce_scatter(x, weight, engine=options.engine), expected, bound
        ),
        "serial": Path(lambda: inputs.serial_reduce_scatter(F.linear(x, weight)), expected, bound),
    }
    if world_size > 1:
        paths["ceiling"] = Path(ceiling, expected, bound)
    shard_rows = -(-tokens // world_size)
    elements = world_size * shard_rows * out_features
    return Prepared(
        paths,
        memory=lambda: _memory("scatter", "partial output", x, elements),
    )


def _memory(kind: str, unit: str, x: torch.Tensor, elements: int) -> list[MemoryUse]:
    """The workspace of that kind; ``elements`` of x's dtype may be held per slot."""
    held = fc.Communicator.of().workspace_bytes().get(kind)
    if held is None:  # the plan took an engine without a workspace
        return []
    what = f"workspace {kind}, {SLOTS} × the {unit} (and {held['flags']} bytes of flags)"
    return [MemoryUse(what, held["data"], SLOTS * elements * x.element_size())]


PREPARE = {
    "all_gather_linear": all_gather_linear,
    "linear_reduce_scatter": linear_reduce_scatter,
}
