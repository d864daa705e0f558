"""One collective at one size: the library's, on private and on symmetric memory, gloo's, MPI's, and
what memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm as fc
from fusedcomm.benchmarks._collectives import mpi
from fusedcomm.benchmarks._collectives.copies import copies
from fusedcomm.benchmarks.harness import (
    Options,
    Path,
    Prepared,
    Ranks,
    Tensors,
    relative_bound,
)

if hasattr(dist, "all_gather_single"):  # torch 2.13's names; it warns at the older ones
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

_partner: mpi.Partner | None = None


def prepare(op: str, nbytes: int, calls: int, options: Options, ranks: Ranks) -> Prepared:
    """The paths of one case.

    Args:
        op: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        nbytes: of the full tensor: what an all-reduce reduces, an all-gather's result, what each
            rank gives to a reduce-scatter or an all-to-all.
        calls: made one after another in a sample, which is the time of them all.
    """
    count = nbytes // options.dtype.itemsize
    inputs = [_values(op, rank, count, options, ranks) for rank in range(ranks.world_size)]
    x = inputs[ranks.rank]
    expected = _expected(op, inputs, ranks)
    bound = 0.0
    if "reduce" in op:
        bound = relative_bound(options.dtype, ranks.world_size, roundings=ranks.world_size)
    out, theirs = x.new_empty(expected.shape), x.new_empty(expected.shape)
    del inputs
    comm = fc.Communicator.of()
    symmetric = comm.symmetric_empty(*x.shape, dtype=x.dtype)
    symmetric.local.copy_(x)
    call: Callable[..., Tensor] = getattr(fc, op)
    paths = {
        "fusedcomm": Path(lambda: call(x, out=out, engine=options.engine), expected, bound),
        "fusedcomm, symmetric": Path(
            lambda: call(symmetric.local, out=out, engine=options.engine), expected, bound
        ),
        "gloo": _gloo(op, x, theirs, expected, bound),
        "copies": Path(copies(op, x, torch.empty_like(out), ranks.rank, ranks.world_size)),
    }
    if calls > 1:
        paths = {name: _repeated(path, calls) for name, path in paths.items()}
    if mpi.is_installed() and options.dtype == torch.float32:
        paths["MPI"] = _mpi(op, count, calls, ranks)
    return Prepared(paths)


def _repeated(path: Path, calls: int) -> Path:
    """The path's work done ``calls`` times in a row, what it has to set up included."""
    setup = path.setup or (lambda: None)

    def run() -> Tensors:
        for _ in range(calls):
            setup()
            result = path.run()
        return result

    return replace(path, run=run, setup=None)


def _values(op: str, rank: int, count: int, options: Options, ranks: Ranks) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    own = count // ranks.world_size if op == "all_gather" else count
    return torch.randn(own, generator=generator).to(options.dtype)


def _expected(op: str, inputs: list[Tensor], ranks: Ranks) -> Tensor:
    if op == "all_gather":
        return torch.cat(inputs).double()
    mine = [x.chunk(ranks.world_size)[ranks.rank] for x in inputs]
    if op == "all_to_all":
        return torch.cat(mine).double()
    total = (inputs if op == "all_reduce" else mine)[0].double()
    for x in (inputs if op == "all_reduce" else mine)[1:]:
        total += x
    return total


def _gloo(op: str, x: Tensor, out: Tensor, expected: Tensor, bound: float) -> Path:
    def run() -> Tensor:
        if op == "all_reduce":
            dist.all_reduce(out)
        elif op == "all_gather":
            _all_gather(out, x)
        elif op == "reduce_scatter":
            _reduce_scatter(out, x)
        else:
            dist.all_to_all_single(out, x)
        return out

    # gloo's all-reduce works in place only: the copy is left out of its time.
    setup = (lambda: out.copy_(x)) if op == "all_reduce" else None
    return Path(run, expected, bound, setup=setup)


def _mpi(op: str, count: int, calls: int, ranks: Ranks) -> Path:
    global _partner
    if _partner is None:
        _partner = mpi.Partner(ranks)
    partner = _partner
    error = partner.prepare(op, count, calls)
    if error > 1e-6:
        raise RuntimeError(f"MPI's {op} is off by {error:.2e}")
    return Path(lambda: torch.empty(0), timed=partner.call)  # it was checked over there
