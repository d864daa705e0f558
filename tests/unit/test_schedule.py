"""Orders are permutations, in which no two ranks hit one peer at once; shards are torch's."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm import schedule
from fusedcomm.schedule import (
    piece_bounds,
    reduce_order,
    scaled_bounds,
    shard_bounds,
    successors,
)

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
totals = st.integers(0, 10_000)
parts = st.integers(1, 64)


def test_examples_in_the_docstrings() -> None:
    results = doctest.testmod(schedule)
    assert results.attempted and not results.failed


@given(totals, parts)
def test_shards_are_those_of_torch_chunk(total: int, count: int) -> None:
    bounds = shard_bounds(total, count)
    ours = [torch.arange(start, stop) for start, stop in bounds]
    theirs = list(torch.arange(total).chunk(count))
    assert len(bounds) == count
    for i, own in enumerate(ours):
        expected = theirs[i] if i < len(theirs) else torch.empty(0, dtype=torch.int64)
        assert torch.equal(own, expected)


@given(totals, parts, st.integers(0, 50))
def test_bounds_are_contiguous_and_the_first_is_longest(total: int, count: int, inner: int) -> None:
    for bounds, end in (
        (shard_bounds(total, count), total),
        (piece_bounds(total, count), total),
        (scaled_bounds(total, count, inner), total * inner),
    ):
        assert bounds[0][0] == 0 and bounds[-1][1] == end
        for (start, stop), (following, _) in zip(bounds, bounds[1:], strict=False):
            assert start <= stop == following
        assert max(stop - start for start, stop in bounds) == bounds[0][1]


def test_sizes_beyond_32_bits() -> None:
    total = 3 * 2**40 + 1
    assert shard_bounds(total, 3)[-1] == (2 * (2**40 + 1), total)
    assert scaled_bounds(2**20, 2, 2**20)[1] == (2**39, 2**40)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_orders_are_permutations(world_size: int) -> None:
    for rank in range(world_size):
        everyone = list(range(world_size))
        assert sorted(reduce_order(rank, world_size)) == everyone
        assert sorted([rank, *successors(rank, world_size)]) == everyone
        assert reduce_order(rank, world_size)[-1] == rank


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("order", [reduce_order, successors])
def test_no_two_ranks_hit_one_peer_in_the_same_step(order, world_size: int) -> None:  # type: ignore[no-untyped-def]
    orders = [order(rank, world_size) for rank in range(world_size)]
    for step in zip(*orders, strict=True):
        assert len(set(step)) == world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_the_others_parts_of_a_chunk_are_made_before_the_owners(world_size: int) -> None:
    for owner in range(world_size):
        made_at = {rank: reduce_order(rank, world_size).index(owner) for rank in range(world_size)}
        last = made_at.pop(owner)
        assert min(made_at, key=made_at.__getitem__) == (owner - 1) % world_size
        assert max(made_at, key=made_at.__getitem__) == (owner + 1) % world_size
        assert max(made_at.values()) == last - 1
