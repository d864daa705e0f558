"""What is measured of one problem, on one rank."""

from __future__ import annotations

import torch

import fusedcomm as fc
from fusedcomm.benchmarks._moe import usual
from fusedcomm.benchmarks._moe.problem import EXPERTS, HIDDEN, Problem, expected, prepare
from fusedcomm.benchmarks.harness import (
    MemoryUse,
    Options,
    Path,
    Prepared,
    Ranks,
    relative_bound,
)
from fusedcomm.protocol import SLOTS


def layer(tokens: int, top_k: int, routing: str, options: Options, ranks: Ranks) -> Prepared:
    """moe_ffn, the usual path, the experts alone, and the least that must be copied."""
    problem = prepare(ranks.rank, ranks.world_size, tokens, top_k, routing, options.dtype)
    right = expected(problem, options.dtype)
    bound = relative_bound(options.dtype, HIDDEN, roundings=6)
    x, ids, weights = problem.x, problem.ids, problem.weights
    w13, w2 = problem.w13, problem.w2
    counts = problem.counts()
    arrived = x.new_ones(sum(counts), HIDDEN)
    finished = torch.empty_like(arrived)
    back = x.new_ones(tokens * top_k, HIDDEN)
    y = torch.empty_like(x)

    def copies() -> torch.Tensor:
        finished.copy_(arrived)  # dispatch: every row is written once more
        torch.sum(back.view(tokens, top_k, HIDDEN), 1, out=y)  # combine: and read once more
        return y

    def fused() -> torch.Tensor:
        return fc.moe_ffn(x, ids, weights, w13, w2, engine=options.engine)

    paths = {"moe_ffn": Path(fused, right, bound), "copies": Path(copies)}
    for name, make in usual.EXPERTS_BY.items():
        run = make(w13, w2)
        paths[f"experts, {name}"] = Path(lambda run=run: run(arrived, counts, finished))  # type: ignore[misc]
        paths[f"usual, {name}"] = Path(
            lambda run=run: usual.moe_ffn(x, ids, weights, run),  # type: ignore[misc]
            right,
            bound,
        )
    return Prepared(paths, memory=lambda: memory(problem, ranks, options))


def exchange(tokens: int, top_k: int, routing: str, options: Options, ranks: Ranks) -> Prepared:
    """dispatch and combine alone, each beside the usual one and a copy of as many bytes."""
    problem = prepare(ranks.rank, ranks.world_size, tokens, top_k, routing, options.dtype)
    x, ids, weights = problem.x, problem.ids, problem.weights
    d = fc.dispatch(x, ids, weights, EXPERTS, engine=options.engine)
    sent = usual.dispatch(x, ids)
    # What the experts make of the rows plays no part: they are sent back as they are.
    h = sent.rows.clone()
    y = (x.double() * weights.double().sum(1, keepdim=True)).double()
    bound = relative_bound(options.dtype, top_k, roundings=1)
    rows = x.new_ones(tokens * min(top_k, ranks.world_size), HIDDEN)
    target = torch.empty_like(rows)
    paths = {
        "dispatch": Path(
            lambda: fc.dispatch(x, ids, weights, EXPERTS, engine=options.engine).x,
            sent.rows.double(),
        ),
        "usual dispatch": Path(lambda: usual.dispatch(x, ids).rows, sent.rows.double()),
        "combine": Path(lambda: fc.combine(h, d), y, bound),
        "usual combine": Path(lambda: usual.combine(h, sent, weights), y, bound),
        "copy": Path(lambda: target.copy_(rows)),
    }
    return Prepared(paths)


def memory(problem: Problem, ranks: Ranks, options: Options) -> list[MemoryUse]:
    """The workspaces' bytes, against SLOTS · hidden · itemsize · (R + k · T) + 4 · W · E."""
    held = fc.Communicator.of().workspace_bytes()
    if "moe rows" not in held:  # the plan took an engine without workspaces
        return []
    everywhere = torch.cat([ids.flatten() for ids in problem.ids_of])
    local = EXPERTS // ranks.world_size
    received = torch.bincount(everywhere, minlength=EXPERTS).view(-1, local).sum(1).max()
    row = SLOTS * HIDDEN * options.dtype.itemsize
    table = -(-4 * EXPERTS // 128) * 128 * ranks.world_size  # whole cache lines
    allowed = row * (int(received) + problem.ids.numel()) + table
    kinds = ("moe counts", "moe rows", "moe returns")
    flags = sum(held[kind]["flags"] for kind in kinds)
    what = f"workspaces of moe_ffn top-{problem.ids.shape[1]} (and {flags} bytes of flags)"
    return [MemoryUse(what, sum(held[kind]["data"] for kind in kinds), allowed)]
