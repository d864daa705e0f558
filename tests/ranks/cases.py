"""One call of a tensor-parallel operation, forward and backward, against float64 and unsharded.

A ``Case`` says what is called; every rank makes the same global tensors from it, takes its shards,
calls the operation, and compares what it gets with its part of the unsharded result. ``check`` is
what the rank functions of the tests call; it raises with the case, the rank, the error and the
bound.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedcomm as fc
from fusedcomm import planning
from fusedcomm.ops import library

COLUMN = ("all_gather_linear", "replicated_linear")  # cut along N; the others along K
ROW = ("linear_reduce_scatter", "linear_all_reduce")
OPS = (*COLUMN, *ROW)
CUTS_TOKENS = ("all_gather_linear", "linear_reduce_scatter")


@dataclass(frozen=True)
class Case:
    """A call, in global sizes.

    Attributes:
        tokens: extents of x's leading dimensions; ``dim`` of them is gathered or scattered.
        k, n: features in, and out of every weight; several weights if ``n`` is a tuple.
        bias: which weights have one.
        layout: "" contiguous; "steps": x, weight and incoming gradient are every second element of
            something larger; "transposed": their strides are reversed.
        exact: entries are 0 and 1, few enough for exact sums; results must be equal.
        needs: whose gradients are asked for, of "x", "w", "b".
        used: which results are differentiated; all by default.
        options: further arguments of the operation.
    """

    op: str
    tokens: tuple[int, ...] = (8,)
    dim: int = 0
    k: int = 12
    n: int | tuple[int, ...] = 10
    bias: bool | tuple[bool, ...] = True
    dtype: torch.dtype = torch.float32
    engine: str = "host"
    layout: str = ""
    exact: bool = False
    needs: str = "xwb"
    used: tuple[bool, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        return isinstance(self.n, tuple)

    @property
    def ns(self) -> tuple[int, ...]:
        return self.n if isinstance(self.n, tuple) else (self.n,)

    @property
    def biases(self) -> tuple[bool, ...]:
        return self.bias if isinstance(self.bias, tuple) else (self.bias,) * len(self.ns)

    @property
    def returns_gathered(self) -> bool:
        return bool(self.options.get("return_gathered"))


def bound(dtype: torch.dtype, k: int, roundings: int = 1) -> float:
    """The largest legal ``‖out − ref‖ / ‖ref‖`` of a sum of ``k`` products.

    Rounding to ``dtype`` changes an element by at most u, half of its epsilon, relatively, so
    ``roundings`` of the whole result (once per rank's partial on the wire counts once: the parts'
    errors add up like the parts) by at most as many u. Below that, products are added in float32
    (float64 for float64), each addition with an error of at most that type's u: the textbook's
    ``k u``. Inputs are rounded before the reference is computed, and cost nothing.
    """
    accumulator = torch.promote_types(dtype, torch.float32)
    u, inner = torch.finfo(dtype).eps / 2, torch.finfo(accumulator).eps / 2
    return roundings * u + (k + 2) * inner


def compare(what: str, got: Tensor, ref: Tensor, limit: float) -> None:
    """Raise unless ``got`` has the shape of ``ref`` (float64) and is within ``limit`` of it.

    A limit of 0 demands equality after rounding ``ref`` to the dtype.
    """
    assert got.shape == ref.shape, f"{what}: shape {list(got.shape)}, expected {list(ref.shape)}"
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    if limit == 0.0:
        wrong = (got != ref.to(got.dtype)).nonzero()
        assert not len(wrong), f"{what}: {len(wrong)} of {ref.numel()} differ, first {wrong[:3]}"
        return
    error = relative_error(got, ref)
    assert error <= limit, f"{what}: relative error {error:.3g} exceeds the bound {limit:.3g}"


def relative_error(got: Tensor, ref: Tensor) -> float:
    """``‖got − ref‖ / ‖ref‖``; 0 for two zeros."""
    difference = (got.double() - ref.double()).norm().item()
    return difference / ref.double().norm().item() if difference else 0.0


def shard(full: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """``torch.chunk``'s piece for ``rank``, empty where it makes fewer."""
    pieces = full.chunk(world_size, dim)
    return pieces[rank] if rank < len(pieces) else full.narrow(dim, full.shape[dim], 0)


def strided(x: Tensor, layout: str) -> Tensor:
    """A tensor equal to ``x`` whose memory is laid out as ``layout`` says; see ``Case``."""
    if layout == "steps":
        spread = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        spread[..., ::2] = x
        return spread[..., ::2]
    if layout == "transposed":
        reversed_dims = list(range(x.dim()))[::-1]
        return x.permute(reversed_dims).contiguous().permute(reversed_dims)
    return x.clone(memory_format=torch.contiguous_format)


@dataclass
class Problem:
    """The global tensors of a case in float64, rounded to its dtype, and the right results.

    ``dgs[r]`` is the gradient that rank r feeds into the gathered x.
    """

    x: Tensor
    ws: list[Tensor]
    bs: list[Tensor | None]
    dys: list[Tensor]
    dgs: list[Tensor]
    ys: list[Tensor]
    dx: Tensor
    dws: list[Tensor]
    dbs: list[Tensor | None]

    @classmethod
    def of(cls, case: Case, world_size: int, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {seed}".encode()))

        def draw(*shape: int) -> Tensor:
            if case.exact:
                values = (torch.rand(shape, generator=generator) < 0.25).double()
            else:
                values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(case.dtype).double()

        x = draw(*case.tokens, case.k).requires_grad_()
        ws = [draw(n, case.k).requires_grad_() for n in case.ns]
        bs = [
            draw(n).requires_grad_() if has else None
            for n, has in zip(case.ns, case.biases, strict=True)
        ]
        used = case.used or (True,) * len(case.ns)
        dys = [draw(*case.tokens, n) for n in case.ns]
        dgs = [draw(*case.tokens, case.k) for _ in range(world_size * case.returns_gathered)]
        ys = [F.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
        loss = sum((x * dg).sum() for dg in dgs) + sum(
            (y * dy).sum() for y, dy, use in zip(ys, dys, used, strict=True) if use
        )
        present = [b for b in bs if b is not None]
        leaves = [x, *ws, *present]
        dx, *rest = torch.autograd.grad(loss, leaves, allow_unused=True)
        dws = [torch.zeros_like(w) if d is None else d for w, d in zip(ws, rest, strict=False)]
        found = iter(rest[len(ws) :])
        dbs = [None if b is None else next(found) for b in bs]
        dbs = [
            torch.zeros_like(b) if b is not None and d is None else d
            for b, d in zip(bs, dbs, strict=True)
        ]
        return cls(
            x.detach(),
            [w.detach() for w in ws],
            [None if b is None else b.detach() for b in bs],
            dys,
            dgs,
            [y.detach() for y in ys],
            dx,
            dws,
            dbs,
        )


@dataclass
class Local:
    """One rank's tensors of a call: its inputs, results and gradients."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def results(self) -> dict[str, Tensor]:
        return self.outputs | self.gradients


def call(case: Case, problem: Problem, rank: int, world_size: int, group: Any = None) -> Local:
    """Call the operation on this rank's shards, and differentiate it."""
    column, cuts = case.op in COLUMN, case.op in CUTS_TOKENS

    def local(full: Tensor, dim: int | None) -> Tensor:
        part = full if dim is None else shard(full, dim, rank, world_size)
        return strided(part.to(case.dtype), case.layout)

    if column:
        x = local(problem.x, case.dim if cuts else None)
    else:
        x = local(problem.x, -1)
    weights = [local(w, 0 if column else 1) for w in problem.ws]
    biases = [None if b is None else local(b, 0 if column else None) for b in problem.bs]
    inputs = {"x": x.requires_grad_("x" in case.needs)}
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        inputs[f"w{i}"] = weight.requires_grad_("w" in case.needs)
        if bias is not None:
            inputs[f"b{i}"] = bias.requires_grad_("b" in case.needs)

    options: dict[str, Any] = {"group": group, "engine": case.engine, **case.options}
    if case.op == "all_gather_linear":
        options.update(gather_dim=case.dim, gathered_size=case.tokens[case.dim])
    elif case.op == "linear_reduce_scatter":
        options.update(scatter_dim=case.dim)
    arguments = (weights, biases) if case.several else (weights[0], biases[0])
    found = getattr(fc, case.op)(x, *arguments, **options)
    found = list(found) if isinstance(found, tuple) else [found]

    outputs = {f"y{i}": y for i, y in enumerate(found)}
    incoming = [local(dy, -1 if column else case.dim if cuts else None) for dy in problem.dys]
    if case.returns_gathered:
        outputs["gathered"] = outputs.pop(f"y{len(found) - 1}")
        incoming.append(local(problem.dgs[rank], None))
    used = [*(case.used or (True,) * len(case.ns)), case.returns_gathered]
    wanted = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
    gradients: dict[str, Tensor] = {}
    if wanted:
        chosen = [(y, dy) for y, dy, use in zip(found, incoming, used, strict=False) if use]
        grads = torch.autograd.grad(
            [y for y, _ in chosen], list(wanted.values()), [dy for _, dy in chosen]
        )
        gradients = {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return Local(inputs, outputs, gradients)


def expected(case: Case, problem: Problem, rank: int, world_size: int) -> dict[str, Tensor]:
    """This rank's parts of the unsharded results, by the names that ``call`` gives them."""
    column, cuts = case.op in COLUMN, case.op in CUTS_TOKENS

    def part(full: Tensor, dim: int | None) -> Tensor:
        return full if dim is None else shard(full, dim, rank, world_size)

    parts: dict[str, Tensor] = {}
    for i, y in enumerate(problem.ys):
        parts[f"y{i}"] = part(y, -1 if column else case.dim if cuts else None)
        parts[f"dw{i}"] = part(problem.dws[i], 0 if column else 1)
        db = problem.dbs[i]
        if db is not None:
            parts[f"db{i}"] = part(db, 0 if column else None)
    parts["dx"] = part(problem.dx, (case.dim if cuts else None) if column else -1)
    parts["gathered"] = problem.x
    return parts


def check_values(case: Case, problem: Problem, found: Local, rank: int, world_size: int) -> None:
    """Every result and gradient is within its bound of the unsharded one."""
    right = expected(case, problem, rank, world_size)
    rows = math.prod(case.tokens)
    # How many products are added up, and how often they may be rounded: partials on the wire and
    # the sum; once per weight and incoming gradient of x; once per chunk of a weight's gradient;
    # and at every hop where torch.distributed adds.
    hops = world_size if case.engine == "plain" else 0
    limits = {
        "y": bound(case.dtype, case.k, 2 + hops),
        "dx": bound(case.dtype, sum(case.ns) + world_size, 2 + len(case.ns) + hops),
        "dw": bound(case.dtype, rows, world_size * MAX_PIECES),
        "db": bound(case.dtype, rows),
        "ga": 0.0,
    }
    for name, got in found.results().items():
        what = f"{case}: {name} on rank {rank} of {world_size}"
        assert got.dtype == case.dtype, f"{what}: dtype {got.dtype}"
        key = name[:1] if name[0] == "y" else name[:2]
        compare(what, got, right[name], 0.0 if case.exact else limits[key])


#: The most pieces that a chunk is cut into by these tests.
MAX_PIECES = 3


def storage_range(tensor: Tensor) -> range:
    """The addresses of a tensor's memory."""
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def check_own_memory(case: Case, found: Local, comm: fc.Communicator) -> None:
    """No result shares memory with an input, another result, or symmetric memory."""
    taken = {f"input {name}": storage_range(x) for name, x in found.inputs.items()}
    for kind, workspace in comm._workspaces.items():
        for owner, segment in enumerate(workspace.segments):
            taken[f"{kind} of rank {owner}"] = range(segment.address, segment.address + segment.size)
    for name, result in found.results().items():
        mine = storage_range(result)
        for other, theirs in taken.items():
            assert not overlap(mine, theirs), f"{case}: {name} shares memory with {other}"
        taken[name] = mine


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory that torch hands out uninitialised is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison_slots(comm: fc.Communicator) -> None:
    """Fill this rank's part of every workspace's data with NaN; call it between two barriers."""
    for workspace in comm._workspaces.values():
        data = workspace.segments[comm.rank].bytes[workspace._data :]
        data[:] = b"\xff" * len(data)


@contextmanager
def planned(
    *, min_chunk_rows: int | None = None, one_shot_bytes: int | None = None, pieces: int = 1
) -> Iterator[None]:
    """Plans as for larger problems, so that small ones reach the same code. For all ranks alike."""
    decide = library.plan

    def plan(*args: Any, **kwargs: Any) -> planning.Plan:
        return replace(decide(*args, **kwargs), pieces=pieces)

    with (
        mock.patch.object(library, "plan", plan),
        mock.patch.multiple(
            planning,
            MIN_CHUNK_ROWS=planning.MIN_CHUNK_ROWS if min_chunk_rows is None else min_chunk_rows,
            ONE_SHOT_BYTES=planning.ONE_SHOT_BYTES if one_shot_bytes is None else one_shot_bytes,
        ),
    ):
        yield


def check(rank: int, cases: Sequence[Case], group: Any = None) -> None:
    """Check every case in turn, on memory full of NaN; results must outlive all later calls."""
    comm = fc.Communicator.of(group) if not isinstance(group, fc.Communicator) else group
    world_size, kept = comm.world_size, []
    for number, case in enumerate(cases):
        problem = Problem.of(case, world_size)
        comm.barrier()
        poison_slots(comm)
        comm.barrier()
        try:
            with poisoned():
                found = call(case, problem, comm.rank, world_size, group)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, fc.AbortedError):
                raise  # the other rank's failure says more
            raise AssertionError(f"{case} on rank {rank} of {world_size}: {error!r}") from error
        check_values(case, problem, found, comm.rank, world_size)
        check_own_memory(case, found, comm)
        copies = {name: result.detach().clone() for name, result in found.results().items()}
        kept.append((number, case, found, copies))
    for number, case, found, copies in kept:
        for name, result in found.results().items():
            assert torch.equal(result, copies[name]), (
                f"case {number}, {case}: {name} on rank {rank} changed after the call returned"
            )


def check_planned(rank: int, cases: Sequence[Case], plans: dict[str, Any]) -> None:
    """``check`` under ``planned(**plans)``."""
    with planned(**plans):
        check(rank, cases)
