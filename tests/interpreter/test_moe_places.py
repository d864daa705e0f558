"""The places that the device computes from a table are those that the host computes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fusedcomm.engines.routed import Routed
from fusedcomm.engines.triton.interpreter import install
from fusedcomm.engines.triton.places import Places, Segments
from fusedcomm.kernels.signals import CAPACITY, RECORD_WORDS
from fusedcomm.planning.moe import Terms
from fusedcomm.planning.routing import MAX_PIECES, Layout, chunk, pieces, place
from fusedcomm.schedule import successors
from tests.conftest import Pools


def launch_of(rank: int, world_size: int) -> Any:
    """What ``Places`` wants of a launch; kernels run at once."""

    def run(kernel: Any, programs: int, kind: str, name: str, **arguments: Any) -> None:
        kernel[(programs,)](**arguments)

    record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
    device = torch.device("cpu")
    return SimpleNamespace(rank=rank, world_size=world_size, device=device, record=record, run=run)


def made(table: np.ndarray, terms: Terms, rank: int) -> tuple[Places, torch.Tensor]:
    nothing, launch = torch.empty(0), launch_of(rank, len(table))
    routed = Routed(terms, rank, len(table), torch.from_numpy(table), nothing, nothing)
    return Places(launch, routed), launch.record


def segments_of(layout: Layout, rank: int, outward: bool) -> list[list[int]]:
    """To every expert, or home to every source; the next rank's first and this rank's own last."""
    found = []
    for peer in (*successors(rank, len(layout.counts_WE)), rank):
        for local, column in enumerate(layout.placement.columns(peer if outward else rank)):
            source, flag = (rank, chunk(local, 0)) if outward else (peer, -1)
            here, there = layout.sent_row_WE[source, column], layout.first_row_WE[source, column]
            if not outward:
                here, there = there, here
            rows = layout.counts_WE[source, column]
            found.append([peer, int(here), int(there), int(rows), flag])
    return found


def check_segments(found: Segments, right: list[list[int]]) -> None:
    assert found.fields.tolist() == right
    counts = [0] * len(found.pieces)
    for peer, _, _, rows, flag in right:
        if flag >= 0:
            counts[peer] += sum(last > first for _, first, last in pieces(rows))
        else:
            counts[peer] += rows > 0
    assert found.pieces.tolist() == counts and found.pieces.dtype == torch.int32
    assert found.counters == len(right) * MAX_PIECES + len(counts)


def check(rank: int) -> None:
    install()
    random = np.random.default_rng(5)
    for world_size, experts, align, owned in [
        (1, 1, 1, False),
        (1, 9, 4, False),
        (2, 5, 1, True),
        (3, 7, 3, False),
        (4, 2, 2, False),  # ranks without experts
        (4, 16, 1, True),
        (8, 130, 128, False),
    ]:
        owners = tuple(random.integers(0, world_size, experts).tolist()) if owned else ()
        terms = Terms(experts, 2, owners, align, None, None)
        placement = place(experts, world_size, owners)
        table = random.integers(0, 5000, (world_size, experts))
        table[random.random(table.shape) < 0.4] = 0
        layout = Layout(table, placement, align)
        for me in range(world_size):
            own = own_of(layout, me)
            places, record = made(table, terms, me)
            assert not record.any()
            assert places.first_E.tolist() == layout.first_row_E[own].tolist()
            assert places.counts_E.tolist() == layout.counts_E[own].tolist()
            assert places.first_WE.tolist() == layout.first_row_WE[:, own].tolist()
            assert places.counts_WE.tolist() == table[:, own].tolist()
            assert places.back_WE.tolist() == layout.sent_row_WE[:, own].tolist()
            check_segments(places.out, segments_of(layout, me, outward=True))
            check_segments(places.back, segments_of(layout, me, outward=False))
            for block in (1, 16, 128):
                begin = (layout.first_row_WE - layout.first_row_E)[:, own]
                last = begin + table[:, own] - 1
                some = np.where(table[:, own] > 0, last // block - begin // block + 1, 0)
                assert places.row_blocks(block).tolist() == some.sum(1).tolist()
        check_room(table, terms, layout)


def check_room(table: np.ndarray, terms: Terms, layout: Layout) -> None:
    """With just enough room nothing is amiss; with one row less, all counts are 0 everywhere."""
    reader, most = int(layout.received.argmax()), layout.most_received
    for me in range(len(table)):
        enough, record = made(table, replace(terms, capacity=most), me)
        assert (
            not record.any() and int(enough.counts_WE.sum()) == table[:, own_of(layout, me)].sum()
        )
        if not most:
            continue
        few, record = made(table, replace(terms, capacity=most - 1), me)
        failed, kind, who, _, room, rows, *_ = record.tolist()
        over = np.flatnonzero(layout.received > most - 1)
        assert (failed, kind, room) == (1, CAPACITY.value, most - 1)
        assert who in over and rows == layout.received[who] and reader in over
        for values in (few.counts_E, few.first_E, few.counts_WE, few.out.pieces, few.back.pieces):
            assert not values.any()
        assert not few.out.fields[:, 3].any() and not few.back.fields[:, 3].any()


def own_of(layout: Layout, rank: int) -> slice:
    columns = layout.placement.columns(rank)
    return slice(columns.start, columns.stop)


def test_places(pools: Pools) -> None:
    pools(1, TRITON_INTERPRET="1").run(check, timeout_s=120)
