"""Ranks that disagree get an error that names both views, in bounded time, whatever they did.

Each case runs on a communicator of its own, once as its first call (where memory is being
allocated) and once after calls that went well; and at the end of each, on the same live ranks, a
new communicator works.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import fusedcomm as fc
from tests.conftest import Pools
from tests.ranks.fault_calls import LIMIT_S, Record, Seen, call, right, see

WARM = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce, one-shot")
T, K, N = 12, 8, 6  # tokens, features, outputs; T is cut evenly over 2 and 3 ranks


def gather(comm: fc.Communicator, rows: int = 4, k: int = K, **options: Any) -> None:
    dtype = options.pop("dtype", torch.float32)
    shape = options.pop("shape", (rows, k))
    weight = torch.ones(N, k, dtype=dtype)
    fc.all_gather_linear(torch.ones(shape, dtype=dtype), weight, group=comm, **options)


def scatter(comm: fc.Communicator, tokens: int = T, n: int = N, **options: Any) -> None:
    _sum(fc.linear_reduce_scatter, comm, tokens, n, options)


def reduce(comm: fc.Communicator, tokens: int = T, n: int = N, **options: Any) -> None:
    _sum(fc.linear_all_reduce, comm, tokens, n, options)


def _sum(
    op: Callable[..., Any], comm: fc.Communicator, tokens: int, n: int, options: dict[str, Any]
) -> None:
    dtype = options.pop("dtype", torch.float32)
    shape = options.pop("shape", (tokens, K))
    bias = torch.ones(n, dtype=dtype) if options.pop("bias", False) else None
    weight = torch.ones(n, K, dtype=dtype)
    op(torch.ones(shape, dtype=dtype), weight, bias, group=comm, **options)


def symmetric(comm: fc.Communicator, shape: tuple[int, ...], **options: Any) -> None:
    comm.symmetric_empty(*shape, **options)


def in_place(comm: fc.Communicator, offset: int = 0, heard: bool = True) -> None:
    memory = comm.symmetric_empty(8, K)
    x = memory.local.fill_(1.0)[offset : offset + 4]
    fc.all_gather_linear(x if heard else x.clone(), torch.ones(N, K), group=comm)


def barrier(comm: fc.Communicator) -> None:
    comm.barrier()


def backward(comm: fc.Communicator, save: bool) -> None:
    x = torch.ones(4, K, requires_grad=True)
    weight = torch.ones(N, K, requires_grad=True)
    fc.all_gather_linear(x, weight, group=comm, save_gathered=save).sum().backward()
    comm.barrier()  # where the rank with one exchange less comes to wait


class Case(NamedTuple):
    """What rank 1 does and what the others do, each as (function, options), one after the other.

    odd_words, other_words   what the message has of the two views
    """

    odd: list[tuple[Callable[..., None], dict[str, Any]]]
    others: list[tuple[Callable[..., None], dict[str, Any]]]
    odd_words: str
    other_words: str


#: For both engines.
ENGINE_CASES = {
    "another operation": Case(
        [(scatter, {})], [(gather, {})], "linear_reduce_scatter", "all_gather_linear"
    ),
    "all-reduce for reduce-scatter": Case(
        [(reduce, {})], [(scatter, {})], "linear_all_reduce", "linear_reduce_scatter"
    ),
    "fewer rows of an all-gather": Case(
        [(gather, {"rows": 3})], [(gather, {"rows": 4})], "all_gather_linear", "all_gather_linear"
    ),
    "many more rows of an all-gather": Case(
        [(gather, {"rows": 9000})],
        [(gather, {"rows": 4})],
        "all_gather_linear",
        "all_gather_linear",
    ),
    "other features of an all-gather": Case([(gather, {"k": 9})], [(gather, {})], "9]", "8]"),
    "other tokens of a reduce-scatter": Case(
        [(scatter, {"tokens": 9})], [(scatter, {})], "9", "12"
    ),
    "other outputs of a reduce-scatter": Case([(scatter, {"n": 7})], [(scatter, {})], "7]", "6]"),
    "other outputs of an all-reduce": Case([(reduce, {"n": 700})], [(reduce, {})], "700]", "6]"),
    "another dtype of an all-gather": Case(
        [(gather, {"dtype": torch.bfloat16})], [(gather, {})], "bfloat16", "float32"
    ),
    "another dtype of an all-reduce": Case(
        [(reduce, {"dtype": torch.float64})], [(reduce, {})], "float64", "float32"
    ),
    "float32 on the wire": Case(
        [(scatter, {"dtype": torch.bfloat16, "wire_dtype": torch.float32})],
        [(scatter, {"dtype": torch.bfloat16})],
        "float32",
        "bfloat16",
    ),
    "float32 in the tensors for float32 on the wire": Case(
        [(reduce, {"dtype": torch.float32})],
        [(reduce, {"dtype": torch.bfloat16, "wire_dtype": torch.float32})],
        "float32",
        "bfloat16",
    ),
    "a bias of a reduce-scatter": Case(
        [(scatter, {"bias": True})], [(scatter, {})], "bias True", "bias False"
    ),
    "a bias of an all-reduce": Case(
        [(reduce, {"bias": True})], [(reduce, {})], "bias True", "bias False"
    ),
    "another cut dimension of an all-gather": Case(
        [(gather, {"shape": (2, 3, K), "gather_dim": 1})],
        [(gather, {"shape": (2, 3, K), "gather_dim": 0})],
        "all_gather_linear",
        "all_gather_linear",
    ),
    "another cut dimension of a reduce-scatter": Case(
        [(scatter, {"shape": (6, 12, K), "scatter_dim": 1})],
        [(scatter, {"shape": (6, 12, K), "scatter_dim": 0})],
        "linear_reduce_scatter",
        "linear_reduce_scatter",
    ),
    "swapped calls": Case(
        [(scatter, {}), (gather, {})],
        [(gather, {}), (scatter, {})],
        "linear_reduce_scatter",
        "all_gather_linear",
    ),
    "one call less": Case(
        [(gather, {}), (scatter, {}), (reduce, {})],
        [(gather, {}), (gather, {}), (scatter, {}), (reduce, {})],
        "linear_reduce_scatter",
        "all_gather_linear",
    ),
}

#: Where the functions have no engine, or the engine is what differs.
CASES = {
    "another engine": Case(
        [(gather, {"engine": "plain"})], [(gather, {"engine": "host"})], "plain", "host"
    ),
    "another engine of an all-reduce": Case(
        [(reduce, {"engine": "host"})], [(reduce, {"engine": "plain"})], "host", "plain"
    ),
    "a barrier for an operation": Case(
        [(barrier, {})], [(gather, {})], "barrier", "all_gather_linear"
    ),
    "a barrier for a plain operation": Case(
        [(barrier, {})], [(reduce, {"engine": "plain"})], "barrier", "linear_all_reduce"
    ),
    "an allocation for an operation": Case(
        [(symmetric, {"shape": (5,)})], [(scatter, {})], "symmetric", "linear_reduce_scatter"
    ),
    "an allocation for a barrier": Case(
        [(symmetric, {"shape": (5,)})], [(barrier, {})], "symmetric", "barrier"
    ),
    "other shapes of a symmetric tensor": Case(
        [(symmetric, {"shape": (5, 7)})], [(symmetric, {"shape": (7, 5)})], "[5, 7]", "[7, 5]"
    ),
    "a larger symmetric tensor": Case(
        [(symmetric, {"shape": (5000, 7)})], [(symmetric, {"shape": (7,)})], "[5000, 7]", "[7]"
    ),
    "a smaller symmetric tensor": Case(
        [(symmetric, {"shape": (7,)})], [(symmetric, {"shape": (5000, 7)})], "[7]", "[5000, 7]"
    ),
    "another dtype of a symmetric tensor": Case(
        [(symmetric, {"shape": (7,), "dtype": torch.int32})],
        [(symmetric, {"shape": (7,)})],
        "int32",
        "float32",
    ),
    "not in symmetric memory": Case(
        [(in_place, {"heard": False})],
        [(in_place, {})],
        "all_gather_linear",
        "in symmetric tensor",
    ),
    "elsewhere in symmetric memory": Case(
        [(in_place, {"offset": 4})], [(in_place, {})], "at 128", "at 0"
    ),
    "saved for the backward pass": Case(
        [(backward, {"save": True})],
        [(backward, {"save": False})],
        "barrier",
        "all_gather_weight_grad",
    ),
}


def disagree(rank: int, name: str, engine: str | None, warm: bool) -> Seen:
    case = {**CASES, **ENGINE_CASES}[name]
    options = {} if engine is None else {"engine": engine}
    with fc.Communicator.of(timeout_s=30) as comm:
        if warm:
            for form in WARM:
                call(form, comm, scale=3000)  # nothing need grow after that
        comm.barrier()
        start = time.monotonic_ns()

        def work() -> None:
            for function, arguments in case.odd if rank == 1 else case.others:
                function(comm, **options, **arguments)
            comm.barrier()

        seen = see(comm, work)
    with fc.Communicator.of() as comm:
        assert all(right(form, comm, call(form, comm)) for form in WARM)
    return replace(seen, at_ns=seen.at_ns - start)


@pytest.mark.parametrize(("warm", "world_size"), [(False, 3), (True, 2)])
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name in ENGINE_CASES for engine in ("host", "plain")]
    + [(name, None) for name in CASES],
)
def test_disagreement_names_both_views(
    pools: Pools,
    record_property: Record,
    name: str,
    engine: str | None,
    warm: bool,
    world_size: int,
) -> None:
    case = {**CASES, **ENGINE_CASES}[name]
    results = pools(world_size).run(disagree, name, engine, warm, timeout_s=40)
    for rank, seen in enumerate(results):
        assert seen.error == "MismatchError", (rank, seen)
        views = views_of(seen.message)
        assert len(views) == 2 and 1 in views, seen.message
        odd = views.pop(1)
        (other,) = views.values()
        assert case.odd_words in odd and case.other_words in other, seen.message
        assert seen.after.startswith("ClosedError") and seen.message in seen.after
    took = max(seen.at_ns for seen in results) / 1e9
    record_property("noticed_s", round(took, 3))
    assert took < LIMIT_S


def views_of(message: str) -> dict[int, str]:
    """What a mismatch's message says of ranks: "rank 0 is in [gather …], rank 1 in [scatter …]"."""
    found = re.findall(r"rank (\d+) (?:is )?(?:in|has) \[(.*?)\](?=[,.]|$)", message)
    return {int(rank): text for rank, text in found}
