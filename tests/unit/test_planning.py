"""Plans: the same on every rank, from global facts alone, with enough memory for what they do."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedcomm as fc
from fusedcomm.planning import spaces
from fusedcomm.planning.tensor_parallel import MIN_CHUNK_ROWS, ONE_SHOT_BYTES, Plan, plan
from fusedcomm.schedule import scaled_bounds
from fusedcomm.symmetric.devices import Domain

CPU = torch.device("cpu")


@dataclass
class Ranks:
    """What planning asks of a communicator."""

    world_size: int
    shares_memory: bool = True
    inside: Any = None
    rank: int = 0
    domain: Domain = Domain("a reason", copies=False)

    def reach(self, device: torch.device) -> Domain:
        return self.domain


def decide(ranks: Ranks, op: str = "linear_all_reduce", size: int = 8, **changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "inner": 1,
        "features": 16,
        "dtype": torch.float32,
        "wire": torch.float32,
        "device": CPU,
        "engine": "auto",
    }
    return plan(ranks, op, size, **(arguments | changes))  # type: ignore[arg-type]


# Which engine


def test_equal_domains_overlap_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, shares_memory=False, inside=Ranks(2))
    chosen = decide(ranks)
    assert (chosen.engine, chosen.one_shot) == ("host", False) and "domain" in chosen.reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = decide(ranks, engine="triton")
    assert (chosen.engine, chosen.chunked, chosen.one_shot) == ("triton", True, False)


def test_cpu_ranks_that_share_memory_overlap() -> None:
    assert decide(Ranks(2)).engine == "host"
    assert decide(Ranks(2), engine="host").engine == "host"


def test_plain_is_had_wherever_it_is_asked_for() -> None:
    for ranks in (Ranks(2), Ranks(2, shares_memory=False)):
        for device in (CPU, torch.device("cuda", 0)):
            chosen = decide(ranks, engine="plain", device=device)
            assert (chosen.engine, chosen.chunked, chosen.one_shot) == ("plain", False, False)


@pytest.mark.parametrize(
    ("ranks", "device", "why"),
    [
        (Ranks(2, shares_memory=False), CPU, "do not share memory"),
        (Ranks(2), torch.device("cuda", 0), "host engine serves CPU tensors|a reason"),
    ],
)
def test_an_engine_that_cannot_be_had(ranks: Ranks, device: torch.device, why: str) -> None:
    with pytest.warns(UserWarning, match=f"without overlap.*{why}"):
        assert decide(ranks, device=device).engine == "plain"
    with pytest.raises(ValueError, match=f'engine="host" cannot serve this call.*{why}'):
        decide(ranks, device=device, engine="host")


def test_no_warning_where_nothing_is_lost() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decide(Ranks(3))
        decide(Ranks(3), engine="plain")


# Which chunking


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_gemm_is_cut_from_enough_rows_a_rank(world_size: int) -> None:
    enough = MIN_CHUNK_ROWS * world_size
    assert decide(Ranks(world_size), size=enough).chunked
    assert not decide(Ranks(world_size), size=enough - world_size).chunked
    assert decide(Ranks(world_size), size=world_size, inner=MIN_CHUNK_ROWS).chunked
    assert not decide(Ranks(world_size), size=0).chunked


def test_a_single_rank_has_one_chunk() -> None:
    for size in (0, 1, 10_000):
        alone = decide(Ranks(1), size=size)
        assert alone.chunked and not alone.one_shot


def test_one_shot_up_to_a_size_on_the_wire() -> None:
    rows = ONE_SHOT_BYTES // (1024 * 4)
    assert decide(Ranks(4), size=rows, features=1024).one_shot
    assert not decide(Ranks(4), size=rows + 1, features=1024).one_shot
    half: dict[str, Any] = {"dtype": torch.bfloat16, "features": 1024}
    assert decide(Ranks(4), size=2 * rows, wire=torch.bfloat16, **half).one_shot
    assert not decide(Ranks(4), size=2 * rows, **half).one_shot  # float32 on the wire
    assert not decide(Ranks(2), size=2 * MIN_CHUNK_ROWS, features=1).one_shot  # chunked


@given(
    st.integers(1, 8),
    st.integers(0, 3000),
    st.integers(0, 40),
    st.integers(0, 5000),
    st.sampled_from(["auto", "host", "plain"]),
)
def test_every_rank_comes_to_the_same_plan(
    world_size: int, size: int, inner: int, features: int, engine: str
) -> None:
    first, *others = (
        decide(
            Ranks(world_size, rank=rank), size=size, inner=inner, features=features, engine=engine
        )  # fmt: skip
        for rank in range(world_size)
    )
    assert all(other == first for other in others)
    assert not (first.chunked and first.one_shot)
    assert first.reason and len(first.text) < 400


def test_the_boards_text_holds_all_that_must_agree() -> None:
    usual = decide(Ranks(2))
    for changes in (
        {"op": "linear_reduce_scatter"},
        {"size": 9},
        {"size": 4, "inner": 2},
        {"features": 17},
        {"dtype": torch.float64, "wire": torch.float32},
        {"wire": torch.float64},
        {"engine": "plain"},
    ):
        assert decide(Ranks(2), **changes).text != usual.text, changes


def test_plans_are_recorded() -> None:
    with fc.trace() as recorded:
        whole = decide(Ranks(2), size=2)
        cut = decide(Ranks(2), size=2 * MIN_CHUNK_ROWS)
        decide(Ranks(2), engine="plain")
    found = [(entry.op, entry.engine, entry.chunks) for entry in recorded.plans]
    op = "linear_all_reduce"
    assert found == [(op, "host", 1), (op, "host", 2), (op, "plain", 1)]
    assert [entry.reason for entry in recorded.plans][:2] == [whole.reason, cut.reason]


# How much memory

shapes = st.lists(st.integers(0, 1500), min_size=1, max_size=3)


@given(shapes, st.integers(1, 2000), st.integers(2, 8), st.sampled_from([2, 4, 8]))
def test_reserve_covers_what_the_operations_take(
    tokens: list[int], features: int, world_size: int, itemsize: int
) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    row_bytes = features * itemsize
    shape = [*tokens, features]

    def reserved(op: str, backward: bool = False) -> dict[str, int]:
        found: dict[str, int] = {}
        for space in spaces(op, shape, world_size, dtype, backward):
            found[space.kind] = max(found.get(space.kind, 0), space.region_bytes)
        return found

    # Calls that cut along the first dimension.
    bounds = scaled_bounds(tokens[0], world_size, math.prod(tokens[1:]))
    shard_bytes = bounds[0][1] * row_bytes
    assert reserved("all_gather_linear") == {"gather": shard_bytes}
    assert reserved("linear_reduce_scatter") == {"scatter": shard_bytes}
    both = {"gather": shard_bytes, "scatter": shard_bytes}
    assert reserved("all_gather_linear", True) == both
    assert reserved("linear_reduce_scatter", True) == both

    # An all-reduce cuts the flattened rows, in one shot or in two.
    rows = math.prod(tokens)
    chosen = decide(Ranks(world_size), size=rows, features=features, dtype=dtype, wire=dtype)
    held = reserved("linear_all_reduce")
    if chosen.one_shot:
        assert held.get("gather", 0) >= rows * row_bytes
    else:
        chunk_bytes = scaled_bounds(rows, world_size, 1)[0][1] * row_bytes
        assert held["scatter"] >= chunk_bytes and held["gather"] >= chunk_bytes


@pytest.mark.parametrize("shape", [(), (4,), (4, -1), (-2, 3)])
def test_shapes_that_are_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="global shape"):
        spaces("all_gather_linear", shape, 2, torch.float32, False)


def test_operations_that_are_none() -> None:
    with pytest.raises(ValueError, match="knows no operation 'matmul'"):
        spaces("matmul", (4, 4), 2, torch.float32, False)
