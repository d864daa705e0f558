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
    for kind, workspace in comm._workspaces.items():
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
        ({"align": 8}, {"capacity": 300}, {"align": 8, "capacity": 400, "max_tokens": 50}),
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
    yield Case(activation="relu2", bias=True)
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
