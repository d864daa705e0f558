"""The tensor-parallel operations, forward and backward, against float64 and unsharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm import protocol
from fusedcomm.planning import tensor_parallel as planning
from fusedcomm.testing import straggler
from tests.conftest import Pools
from tests.ranks.cases import CUTS_TOKENS, OPS, ROW, Case, Problem, call, expected
from tests.ranks.checking import (
    MAX_PIECES,
    bound,
    check,
    check_planned,
    compare,
    planned,
    relative_error,
)

WORLD_SIZES = (1, 2, 3, 4)
ENGINES = ("host", "plain")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

#: Each makes small problems take another way through the engine.
PLANS: dict[str, dict[str, Any]] = {
    "as planned": {},
    "chunked": {"min_chunk_rows": 1},
    "whole, two-shot": {"min_chunk_rows": 1 << 30, "one_shot_bytes": 0},
    "chunked, in pieces": {"min_chunk_rows": 1, "pieces": MAX_PIECES},
    "whole, in pieces": {"min_chunk_rows": 1 << 30, "one_shot_bytes": 0, "pieces": MAX_PIECES},
}


def shapes() -> Iterator[Case]:
    """Rows that do not divide, fewer than ranks, none; up to 4-D; growing and shrinking."""
    for op in OPS:
        for rows in (7, 1, 0, 40, 2, 3, 13, 13):
            yield Case(op, (rows,))
        cut = op in CUTS_TOKENS
        for tokens in ((5, 3), (2, 7), (1, 4), (3, 0), (2, 3, 5), (4, 1, 2)):
            for dim in range(-len(tokens) - 1, len(tokens)) if cut else (0,):
                if dim != -1:
                    yield Case(op, tokens, dim)


def features() -> Iterator[Case]:
    """Features that do not divide, fewer than ranks, none."""
    for op, (k, n) in product(OPS, ((1, 50), (2, 3), (5, 1), (67, 50), (9, 0), (0, 9))):
        yield Case(op, k=k, n=n)


def kinds() -> Iterator[Case]:
    """Data types, with and without bias, in memory of any layout."""
    for op, dtype, layout in product(OPS, DTYPES, ("", "steps", "transposed")):
        yield Case(op, (11,), k=33, n=20, dtype=dtype, layout=layout, values="signed")
    for op, dtype in product(OPS, DTYPES):
        yield Case(op, (11,), k=33, n=20, dtype=dtype, bias=False, values="signed")
    for op, layout in product(OPS, ("steps", "transposed")):
        for dim in (0, 1) if op in CUTS_TOKENS else (0,):
            yield Case(op, (6, 5), dim, k=9, n=7, layout=layout)


def exact() -> Iterator[Case]:
    """Sums of ones that every dtype holds: nothing may be lost, added twice or rounded."""
    for op, dtype in product(OPS, DTYPES):
        yield Case(op, (50,), k=96, n=64, dtype=dtype, values="ones")
        yield Case(op, (17, 3), k=40, n=31, dtype=dtype, values="ones", layout="transposed")
    yield Case("all_gather_linear", (50,), k=64, n=(40, 7), values="ones")


def arguments() -> Iterator[Case]:
    """Several weights, mixed biases, partial use and partial gradients, every option."""
    gather = Case("all_gather_linear", (10,))
    for kept in ({}, {"save_gathered": True}, {"return_gathered": True}):
        options: dict[str, Any] = dict(kept)
        for dtype in (torch.float32, torch.bfloat16):
            base = replace(gather, options=options, dtype=dtype)
            yield base
            yield replace(base, tokens=(5, 3), dim=1, layout="steps")
            yield replace(base, n=(10, 3, 2), bias=(True, False, True))
            yield replace(base, n=(10, 3, 2), bias=(False, True, False), used=(True, False, True))
            yield replace(base, n=(4,), bias=False, tokens=(3,))
            yield replace(base, n=(4, 4), bias=False, tokens=(0,))
        for needs in ("x", "w", "b", "xw", "wb", "xb", ""):
            yield replace(gather, options=options, needs=needs)
    both: dict[str, Any] = {"return_gathered": True, "save_gathered": True}
    yield replace(gather, options=both)
    equal: dict[str, Any] = {"gathered_size": None}
    yield replace(gather, tokens=(12,), options=equal)  # 12 rows are equal shards on 1 to 4 ranks
    yield replace(gather, tokens=(2, 24), dim=1, options=equal, layout="steps")
    yield Case("replicated_linear", (10,), n=(10, 3, 2), bias=(True, False, True))
    yield Case("replicated_linear", (5, 3), n=(10, 3), bias=(False, True), used=(False, True))
    for op, needs in product(OPS[1:], ("x", "w", "b", "xw", "wb", "xb", "")):
        yield Case(op, (10,), needs=needs)
    for op, dtype in product(ROW, (torch.bfloat16, torch.float16, torch.float32)):
        wide: dict[str, Any] = {"wire_dtype": torch.float32}
        same: dict[str, Any] = {"wire_dtype": dtype}
        yield Case(op, (10,), k=100, dtype=dtype, options=wide)
        yield Case(op, (10,), k=100, dtype=dtype, options=wide, bias=False, values="ones")
        yield Case(op, (10,), k=100, dtype=dtype, options=same)


def large(world_size: int) -> Iterator[Case]:
    """Enough rows for the planner to cut by chunks, or to use two shots; and just too few."""
    rows = planning.MIN_CHUNK_ROWS * world_size
    for op in OPS:
        yield Case(op, (rows,), k=16, n=24, values="signed")
        yield Case(op, (rows - world_size,), k=16, n=24)
        yield Case(op, (rows + 1,), k=16, n=24, dtype=torch.bfloat16, bias=False)
        yield Case(op, (2, rows - 1), dim=1 if op in CUTS_TOKENS else 0, k=8, n=24, values="ones")
    megabyte = planning.ONE_SHOT_BYTES // 4
    for rows in (64, 65):
        yield Case("linear_all_reduce", (rows,), k=8, n=megabyte // 64)
        yield Case("replicated_linear", (rows,), k=megabyte // 64, n=8)


def matrix(engine: str) -> list[Case]:
    groups = (shapes, features, kinds, exact, arguments)
    return [replace(case, engine=engine) for group in groups for case in group()]


#: A single rank exchanges nothing, whatever its plan.
HOST = [(1, "as planned"), *((2, plan) for plan in PLANS)]
HOST += [(3, "as planned"), (3, "chunked"), (3, "whole, in pieces")]
HOST += [(4, "as planned"), (4, "chunked, in pieces")]


@pytest.mark.parametrize(("world_size", "plan"), HOST)
def test_host_engine(pools: Pools, world_size: int, plan: str) -> None:
    pools(world_size).run(check_planned, matrix("host"), PLANS[plan])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_plain_engine(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check, matrix("plain"))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_large_problems(pools: Pools, world_size: int) -> None:
    cases = list(large(world_size))
    pools(world_size).run(check, [*cases, *(replace(c, engine="plain") for c in cases)])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_engine_chosen_by_default(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check, [Case(op, engine="auto") for op in OPS])


# The tests above reach what they are meant to reach


def seen_plans(rank: int) -> tuple[dict[str, list[Any]], int]:
    """What ``planned`` does to the plans, and the highest number of a chunk that was signalled."""
    world_size, chunks, seen = dist.get_world_size(), [0], {}
    signalled = protocol.set_recorder(lambda event, chunk, **_: chunks.append(chunk))
    for name, plans in PLANS.items():
        with planned(**plans), fc.trace() as recorded:
            for op in OPS:
                case = Case(op, (8,))
                call(case, Problem.of(case, world_size), rank, world_size)
        seen[name] = [(plan.op, plan.chunks) for plan in recorded.plans]
    protocol.set_recorder(signalled)
    return seen, max(chunks)


def test_plans_are_what_they_are_called(pools: Pools) -> None:
    for seen, highest in pools(2).run(seen_plans):
        assert {chunks for _, chunks in seen["as planned"]} == {1}
        assert {chunks for _, chunks in seen["chunked"]} == {2}
        assert {chunks for _, chunks in seen["whole, two-shot"]} == {1}
        assert highest == MAX_PIECES - 1


# Exactness promised beyond the bounds


def digests(rank: int, cases: list[Case], delay: int | None) -> list[dict[str, str]]:
    """A digest of the bits of every result; one rank may be late at each of its reads."""
    world_size, found = dist.get_world_size(), []
    problems = [Problem.of(case, world_size) for case in cases]
    for case, problem in zip(cases, problems, strict=True):
        if delay is None or world_size == 1:
            results = call(case, problem, rank, world_size).results()
        else:
            with straggler(delay, "signal", 0.003):
                results = call(case, problem, rank, world_size).results()
        found.append(
            {
                name: hashlib.sha1(
                    result.detach().contiguous().view(torch.uint8).numpy().tobytes()
                ).hexdigest()
                for name, result in results.items()
            }
        )
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_are_reproducible_bit_by_bit(pools: Pools, world_size: int) -> None:
    cases = [
        Case(op, (rows,), k=100, n=40, dtype=dtype)
        for op, rows, dtype in product(OPS, (5, 256 * world_size), DTYPES[:3])
    ]
    first = pools(world_size).run(digests, cases, None)
    assert pools(world_size).run(digests, cases, None) == first
    for late in {0, world_size - 1}:
        assert pools(world_size).run(digests, cases, late) == first, f"rank {late} was late"
    for i, case in enumerate(cases):
        replicated = {"linear_all_reduce": "y0", "replicated_linear": "dx"}.get(case.op)
        if replicated:
            assert len({found[i][replicated] for found in first}) == 1, f"{case}: ranks differ"


def check_order(rank: int) -> None:
    """2²⁷ + 1 − 2²⁷ is 0 in float32 if added in this order, and 1 in others."""
    world_size = dist.get_world_size()
    value = [2.0**27, 1.0, -(2.0**27), 0.0][rank]
    for plans in PLANS.values():
        for rows in (world_size, planning.MIN_CHUNK_ROWS * world_size):
            x, weight = torch.ones(rows, 1), torch.full((3, 1), value)
            with planned(**plans):
                summed = fc.linear_reduce_scatter(x, weight, engine="host")
                replicated = fc.linear_all_reduce(x, weight, engine="host")
            for name, y in (("reduce-scatter", summed), ("all-reduce", replicated)):
                assert not y.any(), f"{name}, {rows} rows, {plans}, rank {rank}: {y.unique()}"


@pytest.mark.parametrize("world_size", [3, 4])
def test_partials_are_added_in_the_order_of_ranks(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_order)


def wire_errors(rank: int, case: Case) -> dict[str, float]:
    """The error of y, with partials crossing in x's dtype and in float32."""
    world_size = dist.get_world_size()
    errors = {}
    for wire in (case.dtype, torch.float32):
        options: dict[str, Any] = {"wire_dtype": wire}
        asked = replace(case, options=options)
        problem = Problem.of(replace(asked, options={}), world_size)
        y = call(asked, problem, rank, world_size).outputs["y0"]
        right = expected(case, problem, rank, world_size)["y0"]
        errors[str(wire)] = relative_error(y, right)
        once = bound(case.dtype, case.k, 1 if wire == torch.float32 else 2)
        compare(f"{asked}: y on rank {rank}", y, right, once)
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_float32_on_the_wire_rounds_only_once(
    pools: Pools, world_size: int, dtype: torch.dtype
) -> None:
    for op, rows, engine in product(ROW, (30, 256 * world_size), ENGINES):
        case = Case(
            op, (rows,), k=64 * world_size, n=50, dtype=dtype, engine=engine, values="signed"
        )
        for errors in pools(world_size).run(wire_errors, case):
            narrow, wide = errors[str(dtype)], errors["torch.float32"]
            assert wide < 0.9 * narrow, f"{case}: {wide:.3g} is no better than {narrow:.3g}"


def bias_grad(rank: int, engine: str) -> bytes:
    """Of a bias that all ranks have, from rows whose sum depends on the order."""
    torch.manual_seed(rank)
    world_size = dist.get_world_size()
    x, weight = torch.randn(4 * world_size, 4), torch.randn(5, 4)
    bias = torch.zeros(5, requires_grad=True)
    y = fc.linear_reduce_scatter(x, weight, bias, engine=engine)
    (y * torch.randn_like(y)).sum().backward()
    assert bias.grad is not None
    return bias.grad.numpy().tobytes()


@pytest.mark.parametrize("domains", ["", "0,1;2,3;4,5"])
def test_the_gradient_of_a_bias_is_equal_on_all_ranks(pools: Pools, domains: str) -> None:
    env = {"FUSEDCOMM_DOMAINS": domains} if domains else {}
    found = pools(6 if domains else 3, **env).run(bias_grad, "host")
    assert len(set(found)) == 1
