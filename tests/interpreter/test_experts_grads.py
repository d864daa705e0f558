"""The gradients of experts' weights and biases, run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm.engines import experts as host
from fusedcomm.engines.triton import config
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import launches
from fusedcomm.planning.routing import Layout, place
from fusedcomm.protocol import Space
from tests.conftest import Pools
from tests.ranks.checking import bound, compare, poisoned

NAMES = ("w13", "w2", "b13", "b2")


@dataclass(frozen=True)
class Case:
    """What one rank's experts are given.

    Attributes:
        counts: rows of every expert, of all ranks.
        align: every expert's rows are padded to a multiple of it; behind the last lie more.
        tile: rows and columns of a tile, and of a step along the rows, at most.
        whole: small whole numbers, whose sums are exact.
    """

    counts: tuple[int, ...]
    hidden: int = 24
    ffn: int = 20
    align: int = 1
    transposed: bool = False
    dtype: torch.dtype = torch.float32
    tile: int = 16
    whole: bool = False


UNEVEN = (5, 0, 37, 16, 1, 0, 20)
CASES = [
    Case(UNEVEN),
    Case(UNEVEN, align=8, transposed=True),
    Case((0, 0, 70, 0, 0), align=4),
    Case((0,) * 4),
    Case((33, 7), hidden=16, ffn=16, whole=True),  # fewer experts than ranks
    Case((3, 18, 40), hidden=72, ffn=72, tile=64, dtype=torch.bfloat16, align=16),
    Case((17, 0, 31), hidden=40, ffn=140, tile=64, dtype=torch.float16, transposed=True),
]


class Rank:
    """One rank's rows and experts; NaN in rows of no expert."""

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        layout = Layout(np.array([case.counts]), place(len(case.counts), world_size), case.align)
        self.routed: Any = SimpleNamespace(layout=layout)  # all that the host engine reads of it
        self.own = layout.placement.columns(rank)
        generator = torch.Generator().manual_seed(rank)
        total = int(layout.received[rank]) + 5
        padding = torch.ones(total, dtype=torch.bool)
        self.parts = []
        for column in self.own:
            first, count = int(layout.first_row_E[column]), int(layout.counts_E[column])
            self.parts.append(slice(first, first + count))
            padding[self.parts[-1]] = False

        def draw(*shape: int) -> Tensor:
            drawn = torch.rand(shape, generator=generator)
            return ((drawn * 7).floor() - 3 if case.whole else drawn + 0.5).to(case.dtype)

        def rows(features: int) -> Tensor:
            return draw(total, features).masked_fill(padding[:, None], float("nan"))

        hidden, ffn, count = case.hidden, case.ffn, len(self.own)
        self.rows = [rows(hidden), rows(ffn), rows(2 * ffn), rows(hidden)]  # dh, a, dz, x
        weights = [draw(count, 2 * ffn, hidden), draw(count, hidden, ffn)]
        if case.transposed:
            weights = [weight.transpose(1, 2).contiguous() for weight in weights]
        style = host.Style("swiglu", "gate_up", case.transposed)
        biases = draw(count, 2 * ffn), draw(count, hidden)
        self.experts = host.Experts(weights[0], weights[1], *biases, style)

    def exact(self) -> list[Tensor]:
        """In float64, without rounding."""
        dh, a, dz, x = (rows.double() for rows in self.rows)
        grads: list[Tensor] = [torch.zeros_like(each).double() for each in self.experts[:4]]  # type: ignore[arg-type]
        for expert, part in enumerate(self.parts):
            dw13, dw2 = dz[part].t() @ x[part], dh[part].t() @ a[part]
            transposed = self.experts.style.transposed
            grads[0][expert] = dw13.t() if transposed else dw13
            grads[1][expert] = dw2.t() if transposed else dw2
            grads[2][expert], grads[3][expert] = dz[part].sum(0), dh[part].sum(0)
        return grads


def check(rank: int, cases: Sequence[Case]) -> None:
    comm = fc.Communicator.of()
    space, cpu = Space("test", 1, 16, 1), torch.device("cpu")
    for number, case in enumerate(cases):
        own = Rank(case, rank, comm.world_size)
        # While the host decides on launches it can know nothing about the rows: numbers come only
        # as those are carried out.
        places: Any = SimpleNamespace(
            first_E=torch.full((len(own.parts),), -(2**62)),
            counts_E=torch.full((len(own.parts),), -(2**62)),
        )

        def arrive(places: Any = places, parts: Sequence[slice] = own.parts) -> None:
            for expert, part in enumerate(parts):
                places.first_E[expert] = part.start
                places.counts_E[expert] = part.stop - part.start

        needs = [True] * 4 if number % 2 == 0 else [False, True, True, False]
        with (
            mock.patch.object(config, "_INTERPRETED", case.tile),
            poisoned(),
            launches(comm, "test", space, f"case {number}", cpu) as launch,
        ):
            launch.call(arrive)
            found = experts_grads(launch, places, *own.rows, own.experts, needs)
        theirs = host.experts_grads(*own.rows, own.experts, own.routed, rank, needs)
        terms = max(case.counts)
        for name, needed, got, other, right in zip(
            NAMES, needs, found, theirs, own.exact(), strict=True
        ):
            what = f"{case}: d{name} on rank {rank} of {comm.world_size}"
            assert (got is not None) == needed, what
            if got is None or other is None:
                continue
            assert got.dtype == case.dtype and got.is_contiguous(), what
            limit = bound(case.dtype, terms)
            compare(what, got, right, 0.0 if case.whole else limit)
            compare(f"{what}, host engine", got, other.double(), 0.0 if case.whole else 2 * limit)
            for expert, part in enumerate(own.parts):
                assert part.start < part.stop or not got[expert].any(), f"{what}: no zeros"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_float64_and_the_host_engine(pools: Pools, world_size: int) -> None:
    pools(world_size, TRITON_INTERPRET="1").run(check, CASES, timeout_s=300)
