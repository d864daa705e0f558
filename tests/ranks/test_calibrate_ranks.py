"""Measuring links between real ranks, and using what was measured."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import fusedcomm as fc
from fusedcomm.cli import calibrate
from fusedcomm.topology import Link, calibration
from tests.conftest import Pools


def measure(rank: int) -> list[tuple[str, int]]:
    with mock.patch.multiple(calibrate, SIZES=(1 << 10, 1 << 14), _QUICK_SECONDS=0.0):
        shared, tcp = calibrate.measure(rank, lambda _: None, True)
    assert all(sample.seconds > 0 for sample in shared + tcp)
    for kind, samples in (("shared-memory", shared), ("tcp", tcp)):
        link = calibrate.fit(kind, samples)
        assert link.latency_s > 0 and link.bandwidth > 0
    return [(sample.algorithm, sample.nbytes) for sample in shared]


def test_real_ranks_are_measured(pools: Pools) -> None:
    first, second = pools(2).run(measure)
    assert first == second
    assert first[:2] == [("one_shot", 1024), ("two_shot", 1024)]


def chosen(rank: int, caches: list[str]) -> list[tuple[str, float]]:
    """Every rank has a file of its own, as on machines of their own; rank 0's holds for all."""
    found = []
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=caches[rank]):
        calibration.load.cache_clear()
        with fc.Communicator.of(channel="calibrated") as comm:
            link = comm.topology.slowest_inside
            assert link is not None
            found.append((link.kind, link.latency_s))
    calibration.load.cache_clear()
    return found


def test_a_group_uses_what_its_first_rank_measured(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [str(tmp_path / str(rank)) for rank in range(2)]
    for latency, cache in zip((1e-3, 2e-3), caches, strict=True):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        calibration.save({"shared-memory": Link("shared-memory", 1e9, latency)}, {})
    calibration.load.cache_clear()
    assert pools(2).run(chosen, caches) == [[("shared-memory", 1e-3)]] * 2
