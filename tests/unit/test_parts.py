"""The part of a tensor that the ranks of one domain have, together and scattered."""

from __future__ import annotations

import pytest
import torch

from fusedcomm.engines.across.parts import Part
from fusedcomm.schedule import scaled_bounds

DOMAINS = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]


@pytest.mark.parametrize("domains", DOMAINS)
@pytest.mark.parametrize("size", [8, 7, 5, 3, 1, 0])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_make_up_the_whole(domains: tuple[tuple[int, ...], ...], size: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = 2 * size
    full = torch.arange(6.0 * size).view(shape)
    bounds = scaled_bounds(size, 4, 2)
    again = torch.full(shape, torch.nan)
    for ranks in domains:
        part = Part(bounds, ranks, dim)
        found = part.of(full)
        shards = [full.narrow(dim, *_start_and_length(bounds[rank])) for rank in ranks]
        assert torch.equal(found, torch.cat(shards, dim))
        for (start, stop), shard in zip(part.inner, shards, strict=True):
            assert torch.equal(found.narrow(dim, start, stop - start), shard)
        place = part.place(again)
        assert place.shape == found.shape
        part.put(again, place.copy_(found))
    assert torch.equal(again, full)


def test_ranks_side_by_side_are_written_in_place() -> None:
    full = torch.zeros(8, 2)
    bounds = scaled_bounds(8, 4, 1)
    storage = full.untyped_storage().data_ptr()
    assert Part(bounds, (2, 3), 0).place(full).untyped_storage().data_ptr() == storage
    assert Part(bounds, (1, 3), 0).place(full).untyped_storage().data_ptr() != storage


def _start_and_length(bound: tuple[int, int]) -> tuple[int, int]:
    return bound[0], bound[1] - bound[0]
