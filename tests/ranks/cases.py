"""One call of a tensor-parallel operation, forward and backward, against float64 and unsharded.

A ``Case`` says what is called; every rank makes the same global tensors from it, takes its shards,
calls the operation, and compares what it gets with its part of the unsharded result. ``check`` is
what the rank functions of the tests call; it raises with the case, the rank, the error and the
bound.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedcomm as fc

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
        values: "positive": entries from 0.5 to 1.5, whose sums do not cancel, so that the bounds
            are certain; "signed": normally distributed; "ones": 0 and 1, few enough that
            all sums are exact.
        needs: whose gradients are asked for, of "x", "w", "b".
        used: which results are differentiated; all by default.
        options: further arguments of the operation.
        seed: tells equal cases with different data apart.
        device: where this rank's tensors lie.
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
    values: str = "positive"
    needs: str = "xwb"
    used: tuple[bool, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        """What differs from the defaults."""
        differing = []
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            usual = {} if each.default is MISSING else each.default
            if value != usual:
                differing.append(f"{each.name}={value}")
        return f"{self.op}({', '.join(differing)})"

    @property
    def size(self) -> int:
        """The extent of the cut dimension, which ``dim`` counts from the left or with features."""
        return (*self.tokens, self.k)[self.dim]

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
    def of(cls, case: Case, world_size: int) -> Problem:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))

        def draw(*shape: int) -> Tensor:
            if case.values == "signed":
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            else:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
                drawn = (drawn < 0.25).double() if case.values == "ones" else drawn + 0.5
            return drawn.to(case.dtype).double()

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
        terms = [(x * dg).sum() for dg in dgs]
        terms += [(y * dy).sum() for y, dy, use in zip(ys, dys, used, strict=True) if use]
        present = [b for b in bs if b is not None]
        leaves = [x, *ws, *present]
        dx, *rest = torch.autograd.grad(torch.stack(terms).sum(), leaves, allow_unused=True)
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
        return strided(part.to(case.dtype).to(case.device), case.layout)

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

    options: dict[str, Any] = {"group": group, "engine": case.engine}
    if case.op == "all_gather_linear":
        options |= {"gather_dim": case.dim, "gathered_size": case.size}
    elif case.op == "linear_reduce_scatter":
        options["scatter_dim"] = case.dim
    options |= case.options
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
