"""One call of the mixture of experts, forward and backward, against a dense loop in float64.

Every rank makes all ranks' tensors from a ``Case``, calls the operation on its own, and compares
with its part of the loop over all experts and all ranks' tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedcomm as fc

OPS = ("pair", "moe_ffn")


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        op: "moe_ffn", or "pair": dispatch, experts written with torch, combine.
        tokens: T of every rank in turn; the last goes on for further ranks.
        routing: see ``choose``.
        bias, weighted: whether experts have biases, and choices weights.
        values: "positive": entries whose sums do not cancel, so that bounds are certain.
        options: further arguments of the operation.
    """

    op: str = "moe_ffn"
    tokens: tuple[int, ...] = (9, 5)
    k: int = 2
    experts: int = 8
    hidden: int = 16
    ffn: int = 8
    routing: str = "random"
    bias: bool = False
    weighted: bool = True
    activation: str = "swiglu"
    layout: str = "gate_up"
    transposed: bool = False
    dtype: torch.dtype = torch.float32
    engine: str = "host"
    owners: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the defaults."""
        differing = []
        for each in fields(self)[1:]:
            usual = {} if each.default is MISSING else each.default
            if (value := getattr(self, each.name)) != usual:
                differing.append(f"{each.name}={value}")
        return f"{self.op}({', '.join(differing)})"

    def count(self, rank: int) -> int:
        return self.tokens[min(rank, len(self.tokens) - 1)]

    @property
    def width(self) -> int:
        return self.ffn if self.activation == "relu2" else 2 * self.ffn

    def experts_of(self, rank: int, world_size: int) -> list[int]:
        """The ids of a rank's experts."""
        if self.owners:
            return [e for e, owner in enumerate(self.owners) if owner == rank]
        block = -(-self.experts // world_size)
        return list(range(self.experts))[rank * block : (rank + 1) * block]


def choose(case: Case, rank: int, world_size: int, generator: torch.Generator) -> Tensor:
    """The ids ``[T, k]`` of one rank."""
    tokens, k, experts = case.count(rank), case.k, case.experts
    if case.routing == "balanced":
        return (torch.arange(tokens * k) + rank).reshape(tokens, k) % experts
    if case.routing == "one expert":
        return torch.full((tokens, k), experts - 1)
    if case.routing == "one rank":
        own = torch.tensor(case.experts_of(world_size - 1, world_size) or [0])
        return own[torch.randint(0, len(own), (tokens, k), generator=generator)]
    if case.routing == "none":
        return torch.full((tokens, k), -1)
    if case.routing in ("duplicates", "skewed"):
        drawn = torch.rand(tokens, k, generator=generator)
        return (drawn ** (3 if case.routing == "skewed" else 1) * experts).long()
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    if case.routing == "sentinels":
        masked = torch.rand(tokens, k, generator=generator) < 0.4
        masked |= torch.rand(tokens, 1, generator=generator) < 0.2
        wrong = torch.tensor([-1, experts, -(2**31), experts + 1000])
        which = torch.randint(0, len(wrong), (tokens, k), generator=generator)
        return torch.where(masked, wrong[which], ids)
    assert case.routing == "random", case.routing
    return ids


@dataclass
class Problem:
    """All ranks' tensors in float64, rounded to the case's dtype."""

    xs: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    dys: list[Tensor]
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @classmethod
    def of(cls, case: Case, world_size: int) -> Problem:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
            return (drawn * scale).to(case.dtype).double()

        ranks = range(world_size)
        counts = [case.count(rank) for rank in ranks]
        e, h, f, w = case.experts, case.hidden, case.ffn, case.width
        return cls(
            [draw(t, h) for t in counts],
            [choose(case, rank, world_size, generator) for rank in ranks],
            [draw(t, case.k).float().double() for t in counts],
            [draw(t, h) for t in counts],
            draw(e, w, h, scale=1.0 / h),
            draw(e, h, f, scale=1.0 / f),
            draw(e, w) if case.bias else None,
            draw(e, h) if case.bias else None,
        )


def activation(z: Tensor, case: Case) -> Tensor:
    if case.activation == "relu2":
        return z.relu().square()
    if case.layout == "interleaved":
        gate, up = z[..., ::2], z[..., 1::2]
    else:
        gate, up = z.chunk(2, -1)
    if case.activation == "swiglu":
        return F.silu(gate) * up
    if case.activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return F.gelu(gate, approximate="tanh" if "tanh" in case.activation else "none") * up


def expert(case: Case, x: Tensor, w13: Tensor, w2: Tensor, b13: Any, b2: Any) -> Tensor:
    return F.linear(activation(F.linear(x, w13, b13), case), w2, b2)


def expected(case: Case, problem: Problem, rank: int, world_size: int) -> dict[str, Tensor]:
    """What a rank must get: y, and gradients, from one loop over the experts."""
    xs = [x.clone().requires_grad_() for x in problem.xs]
    ws = [w.clone().requires_grad_() for w in problem.weights]
    shared = {
        name: tensor.clone().requires_grad_()
        for name in ("w13", "w2", "b13", "b2")
        if (tensor := getattr(problem, name)) is not None
    }
    x, ids = torch.cat(xs), torch.cat(problem.ids)
    weights = torch.cat(ws) if case.weighted else torch.ones(ids.shape, dtype=torch.float64)
    y = x * 0.0
    for e in range(case.experts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        if len(token):
            own = [shared[n][e] if n in shared else None for n in ("w13", "w2", "b13", "b2")]
            rows = expert(case, x[token], *own)  # type: ignore[arg-type]
            y = y.index_add(0, token, rows * weights[token, choice, None])
    (y * torch.cat(problem.dys)).sum().backward()
    begin = sum(len(earlier) for earlier in xs[:rank])
    mine = case.experts_of(rank, world_size)

    def grad(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    found = {"y": y[begin : begin + len(xs[rank])].detach(), "dx": grad(xs[rank])}
    if case.weighted:
        found["dweights"] = grad(ws[rank])
    found |= {f"d{name}": grad(tensor)[mine] for name, tensor in shared.items()}
    return found


@dataclass
class Local:
    """A rank's own tensors, and the results."""

    inputs: dict[str, Tensor]
    y: Tensor
    d: fc.Dispatched | None

    def results(self) -> dict[str, Tensor]:
        found = {"y": self.y.detach()}
        for name, tensor in self.inputs.items():
            if tensor.grad is not None:
                found[f"d{name}"] = tensor.grad
        return found


def call(case: Case, problem: Problem, rank: int, world_size: int, group: Any = None) -> Local:
    """The call on one rank, with NaN behind what is masked."""
    ids = problem.ids[rank]
    mine = case.experts_of(rank, world_size)
    masked = (ids < 0) | (ids >= case.experts)

    def leaf(tensor: Tensor, dtype: torch.dtype = case.dtype) -> Tensor:
        return tensor.to(dtype).clone().requires_grad_()

    def spoilt(tensor: Tensor, where: Tensor) -> Tensor:
        return tensor.masked_fill(where, float("nan"))

    wide = torch.promote_types(case.dtype, torch.float32)
    inputs = {"x": leaf(spoilt(problem.xs[rank], masked.all(1, keepdim=True)))}
    if case.weighted:
        inputs["weights"] = leaf(spoilt(problem.weights[rank], masked), wide)
    for name in ("w13", "w2", "b13", "b2"):
        full = getattr(problem, name)
        if full is None:
            continue
        own = full[mine]
        if case.transposed and name[0] == "w":
            own = own.transpose(1, 2)
        inputs[name] = leaf(own)
    options: dict[str, Any] = {"group": group, "engine": case.engine, **case.options}
    save_rows = options.pop("save_rows", True)
    if case.owners:
        options["placement"] = case.owners
    x, weights = inputs["x"], inputs.get("weights")
    d = None
    if case.op == "moe_ffn":
        y = fc.moe_ffn(
            x, ids, weights, inputs["w13"], inputs["w2"],
            b13=inputs.get("b13"), b2=inputs.get("b2"), num_experts=case.experts,
            activation=case.activation, layout=case.layout, transposed=case.transposed,
            save_rows=save_rows, **options,
        )  # fmt: skip
    else:
        d = fc.dispatch(x, ids, weights, case.experts, **options)
        check_handle(case, problem, d, rank, world_size)
        y = fc.combine(by_hand(case, d, inputs), d, save_rows=save_rows)
    y.backward(problem.dys[rank].to(case.dtype))
    if case.transposed:
        for name in ("w13", "w2"):
            grad = inputs[name].grad
            inputs[name].grad = None
            inputs[f"{name}"] = inputs[name].detach().transpose(1, 2)
            inputs[f"{name}"].grad = None if grad is None else grad.transpose(1, 2)
    return Local(inputs, y, d)


def by_hand(case: Case, d: fc.Dispatched, inputs: dict[str, Tensor]) -> Tensor:
    """The experts, written with torch on the rows of a handle; NaN in rows of padding."""
    blocks, begin = [], 0
    for e, (end, count) in enumerate(zip(d.offs.tolist(), d.counts.tolist(), strict=True)):
        own = [inputs[n][e] if n in inputs else None for n in ("w13", "w2", "b13", "b2")]
        blocks.append(expert(case, d.x[begin : begin + count], *own))  # type: ignore[arg-type]
        blocks.append(d.x.new_full((end - begin - count, case.hidden), float("nan")))
        begin = end
    blocks.append(d.x.new_full((d.x.shape[0] - begin, case.hidden), float("nan")))
    return torch.cat(blocks)


def check_handle(
    case: Case, problem: Problem, d: fc.Dispatched, rank: int, world_size: int
) -> None:
    """Rows are sorted by (expert, source, token, choice), padded with zeros; counts say so."""
    what = f"{case}: handle on rank {rank} of {world_size}"
    align = case.options.get("align", 1)
    begin = 0
    for place, e in enumerate(case.experts_of(rank, world_size)):
        rows = [
            x[token]
            for x, ids in zip(problem.xs, problem.ids, strict=True)
            for token in (ids == e).nonzero(as_tuple=True)[0]
        ]
        count, padded = len(rows), -(-len(rows) // align) * align
        assert int(d.counts[place]) == count, what
        assert int(d.padded_counts[place]) == padded, what
        assert int(d.offs[place]) == begin + padded, what
        if rows:
            right = torch.stack(rows).to(case.dtype)
            assert torch.equal(d.x[begin : begin + count].detach(), right), f"{what}: expert {e}"
        assert not d.x[begin + count : begin + padded].any(), f"{what}: padding of expert {e}"
        begin += padded
    assert d.x.shape[0] == case.options.get("capacity", begin), what
    assert not d.x[begin:].any(), f"{what}: rows behind the last"
    assert d.offs.dtype == d.counts.dtype == torch.int32
    assert int(d.dropped) == 0
