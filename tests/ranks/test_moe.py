"""Dispatch, combine and moe_ffn against a dense loop in float64, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.checking import bound, compare, overlap, poison_slots, poisoned, storage_range
from tests.ranks.moe_cases import OPS, Case, Local, Problem, call, expected

WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(rank: int, cases: Sequence[Case], group: Any = None) -> None:
    """Check every case in turn, on memory full of NaN; no later call may change its results."""
    comm = fc.Communicator.of(group) if not isinstance(group, fc.Communicator) else group
    rank, world_size, kept = comm.rank, comm.world_size, []
    for number, case in enumerate(cases):
        problem = Problem.of(case, world_size)
        if number % 3 == 0:
            comm.barrier()
            poison_slots(comm)
            comm.barrier()
        try:
            with poisoned():
                found = call(case, problem, rank, world_size, group)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, fc.AbortedError):
                raise  # the other rank's failure says more
            raise AssertionError(f"{case} on rank {rank} of {world_size}: {error!r}") from error
        check_values(case, problem, found, rank, world_size)
        check_own_memory(case, found, comm)
        copies = {name: result.clone() for name, result in found.results().items()}
        kept.append((case, found, copies))
    for case, found, copies in kept:
        for name, result in found.results().items():
            assert torch.equal(result, copies[name]), f"{case}: {name} changed after the call"


def check_values(case: Case, problem: Problem, found: Local, rank: int, world_size: int) -> None:
    """Every result and gradient is there, and within its bound of the dense loop's."""
    right = expected(case, problem, rank, world_size)
    results = found.results()
    missing = right.keys() - results.keys()
    if case.op == "pair" and not case.experts_of(rank, world_size):
        missing -= {"dw13", "dw2", "db13", "db2"}  # nobody has touched these tensors of no experts
    assert not missing, f"{case}: no {missing} on rank {rank} of {world_size}"
    terms = max(case.hidden, case.ffn, case.k, sum(len(x) for x in problem.xs))
    for name, got in results.items():
        what = f"{case}: {name} on rank {rank} of {world_size}"
        # The rows, z, a, h; dh, da, dz; and each may be felt twice.
        limit = bound(case.dtype, terms, 8 if name == "y" else 14)
        compare(what, got, right[name], limit)


def check_own_memory(case: Case, found: Local, comm: fc.Communicator) -> None:
    """No result shares memory with an input or with symmetric memory."""
    taken = {name: storage_range(x) for name, x in found.inputs.items()}
    for kind, workspace in (comm.inside or comm).memory.workspaces.items():
        for owner, segment in enumerate(workspace.segments):
            taken[f"{kind} of rank {owner}"] = range(
                segment.address, segment.address + segment.size
            )
    results = found.results() | ({"d.x": found.d.x} if found.d else {})
    for name, result in results.items():
        for other, theirs in taken.items():
            assert not overlap(storage_range(result), theirs), f"{case}: {name} lies in {other}"


def routings() -> Iterator[Case]:
    """Who gets how much, and what ids may be."""
    kinds = ("random", "balanced", "one expert", "one rank", "duplicates", "sentinels", "none")
    for op, routing in product(OPS, kinds):
        yield Case(op, routing=routing)
    for op, tokens in product(OPS, [(0, 7), (7, 0, 0, 0), (0,), (1,), (2, 127)]):
        yield Case(op, tokens, routing="sentinels", bias=True)
    for op, (k, experts) in product(OPS, [(1, 8), (8, 8), (10, 64), (5, 5), (8, 64)]):
        yield Case(op, k=k, experts=experts, routing="sentinels" if k == 10 else "random")
    for op, experts in product(OPS, (1, 2, 7, 256)):
        yield Case(op, k=1, experts=experts, tokens=(40, 3))


def arguments() -> Iterator[Case]:
    for op, dtype in product(OPS, DTYPES):
        yield Case(op, (33, 20), dtype=dtype, bias=True, routing="sentinels", options={"align": 4})
    for op, options in product(
        OPS,
        (
            {"save_rows": False},
            {"align": 8},
            {"capacity": 300},
            {"align": 8, "capacity": 400, "max_tokens": 50},
        ),
    ):
        yield Case(op, options=options, routing="sentinels")
    for op in OPS:
        yield Case(op, weighted=False)
        yield Case(op, owners=(0, 0, 0, 0, 0, 0, 0))
    for activation, layout in product(
        ("swiglu", "geglu", "geglu_tanh", "gpt_oss"), ("gate_up", "interleaved")
    ):
        transposed = layout == "interleaved"
        yield Case(activation=activation, layout=layout, transposed=transposed, bias=True)
    yield Case(activation="relu2", bias=True, options={"save_rows": False, "align": 4})
    yield Case(activation="relu2", transposed=True)


def matrix(engine: str, world_size: int) -> list[Case]:
    found = []
    for case in [*routings(), *arguments()]:
        if case.owners:
            owners = tuple((e * 2 + 1) % world_size for e in range(case.experts))
            case = replace(case, owners=owners)
        found.append(replace(case, engine=engine))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_against_a_dense_loop(pools: Pools, engine: str, world_size: int) -> None:
    pools(world_size).run(check, matrix(engine, world_size), timeout_s=120)


def large(world_size: int) -> list[Case]:
    """Real extents, and numbers of tokens at the edges of blocks."""
    tokens = [1, 2, 127, 128, 129, 4095]
    found = [
        Case(op, (t, tokens[-1 - i]), k=2 + 6 * (t == 128), experts=8, routing="skewed")
        for op in OPS
        for i, t in enumerate(tokens)
        if i < 3 or op == "moe_ffn"
    ]
    for op, hidden in product(OPS, (72, 2880, 7168)):
        found.append(Case(op, (12, 5), hidden=hidden, ffn=24, routing="sentinels"))
    found.append(Case("moe_ffn", (40, 9), k=8, experts=256, hidden=72, routing="sentinels"))
    found.append(Case("pair", (40, 9), k=10, experts=64, hidden=72, routing="random"))
    # Several pieces to a segment, several units to an expert, products straight to their reader.
    found.append(Case("moe_ffn", (3000, 700), k=2, experts=3, dtype=torch.bfloat16))
    found.append(Case("pair", (3000, 700), k=2, experts=3, routing="one expert"))
    return [replace(case, engine="host") for case in found]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_large_problems(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check, large(world_size), timeout_s=120)


# What a dense loop cannot show


def exact(rank: int, engine: str, world_size: int) -> None:
    """Small integers come back exactly: k copies of each row, each with its weight."""
    for k, options in product((1, 3, 9), ({}, {"align": 16}, {"capacity": 400 * world_size})):
        generator = torch.Generator().manual_seed(rank)
        tokens = 11 + 20 * rank
        x = torch.randint(-8, 9, (tokens, 40), generator=generator).to(torch.bfloat16)
        ids = torch.randint(-1, 6, (tokens, k), generator=generator)
        weights = torch.randint(0, 4, (tokens, k), generator=generator).double()
        d = fc.dispatch(x, ids, weights, 5, engine=engine, **options)
        y = fc.combine(d.x, d)
        taken = (weights * ((ids >= 0) & (ids < 5))).sum(1, keepdim=True)
        assert torch.equal(y, (x.double() * taken).to(torch.bfloat16)), f"k={k}, {options}"
        # The same plan with other rows, of another size, and back in another size still.
        again = fc.dispatch(x[:, :8].float(), plan=d)
        assert torch.equal(again.x, d.x[:, :8].float())
        back = fc.combine(torch.cat([again.x, again.x], 1), again)
        assert torch.equal(back[:, 8:], (x[:, :8].double() * taken).float())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_rows_come_back_exactly_and_plans_are_replayed(
    pools: Pools, engine: str, world_size: int
) -> None:
    pools(world_size).run(exact, engine, world_size)


def forms(rank: int, engine: str) -> None:
    """Leading dimensions flatten to tokens; strides, and the dtypes of ids and weights, vary."""
    case = Case("moe_ffn", (24, 12), k=2, experts=5, bias=True, engine=engine)
    world_size = fc.Communicator.of().world_size
    problem = Problem.of(case, world_size)
    right = expected(case, problem, rank, world_size)
    mine = case.experts_of(rank, world_size)
    shape = (2, 3, case.count(rank) // 6)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """The same values, every second of a larger tensor's."""
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -77)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    dtypes = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)
    for dtype in dtypes:
        x = spread(problem.xs[rank].float().view(*shape, -1)).requires_grad_()
        ids = spread(problem.ids[rank].to(torch.int64).view(*shape, 2)).to(dtype)
        weights = problem.weights[rank].view(*shape, 2).requires_grad_()  # float64
        own = [spread(t[mine].float()) for t in (problem.w13, problem.w2)]
        biases = {n: spread(getattr(problem, n)[mine].float()) for n in ("b13", "b2")}
        dy = problem.dys[rank].float().view(shape[::-1] + (-1,)).permute(2, 1, 0, 3)
        flat = dy.reshape(case.count(rank), -1).double()
        y = fc.moe_ffn(x, ids, weights, *own, **biases, num_experts=5, engine=engine)
        assert y.shape == x.shape
        compare(f"{dtype}", y.reshape(right["y"].shape), right["y"], bound(torch.float32, 50, 8))
        y.backward(dy)
        assert x.grad is not None and weights.grad is not None
        assert x.grad.shape == x.shape and weights.grad.dtype == torch.float64
        d = fc.dispatch(x.detach(), ids, weights.detach(), 5, engine=engine)
        rows = fc.combine(d.x, d)
        taken = weights.detach().sum(-1, keepdim=True)
        torch.testing.assert_close(rows, (x.detach() * taken).float())
        assert (flat != problem.dys[rank]).any()  # the gradient's strides are not x's


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("engine", ["host", "plain"])
def test_leading_dimensions_strides_and_dtypes(pools: Pools, engine: str, world_size: int) -> None:
    pools(world_size).run(forms, engine)
