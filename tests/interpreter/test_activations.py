"""The experts' activations and their gradients, run by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm.engines import experts as host
from fusedcomm.engines.experts import ACTIVATIONS, LAYOUTS, Style
from fusedcomm.engines.triton import activations
from fusedcomm.engines.triton.config import Tiles
from fusedcomm.engines.triton.launch import launches
from fusedcomm.protocol import Space
from tests.conftest import Pools
from tests.ranks.checking import bound, compare
from tests.ranks.moe_cases import Case as Mixture
from tests.ranks.moe_cases import activation

NAN = float("nan")
#: What rows of no expert hold, where results go.
KEPT = 77.0


@dataclass(frozen=True)
class Case:
    """What one rank's experts are given.

    Attributes:
        counts: rows of every expert; each one's are padded to a multiple of ``align``, and behind
            the last lie more.
        features: read at once, at most.
    """

    activation: str
    layout: str
    dtype: torch.dtype = torch.float32
    ffn: int = 21
    counts: tuple[int, ...] = (5, 0, 9, 1, 4)
    align: int = 4
    features: int = 16


CASES = [
    *(Case(*each) for each in product(ACTIVATIONS, LAYOUTS, (torch.float32, torch.bfloat16))),
    *(Case(name, "interleaved", torch.float16) for name in ACTIVATIONS),
    Case("swiglu", "gate_up", ffn=1, align=1),
    Case("geglu", "interleaved", ffn=16, counts=(0, 0, 3), align=1),
    Case("swiglu", "gate_up", ffn=520, counts=(8,), features=512),
    Case("gpt_oss", "interleaved", counts=(0, 0)),
    Case("relu2", "gate_up", counts=()),
]


class Rows:
    """z and da, NaN in rows of no expert; and where each expert's rows lie."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parts, first = [], 0
        for count in case.counts:
            self.parts.append(slice(first, first + count))
            first += -(-count // case.align) * case.align
        total = first + 6
        self.real = torch.zeros(total, dtype=torch.bool)
        for part in self.parts:
            self.real[part] = True
        width = case.ffn if case.activation == "relu2" else 2 * case.ffn
        # Large enough for gpt-oss's limits.
        self.z, self.da = (
            (torch.randn(total, features, generator=generator) * scale)
            .to(case.dtype)
            .masked_fill(~self.real[:, None], NAN)
            for features, scale in ((width, 6.0), (case.ffn, 1.0))
        )

    def results(self) -> list[Tensor]:
        """Where activations, activations again, and the gradients of z go."""
        return [torch.full_like(like, KEPT) for like in (self.da, self.da, self.z)]


def computed(comm: fc.Communicator, case: Case, given: Rows, style: Style) -> list[Tensor]:
    """a, a again and dz by the kernels; the same where a takes the place of da."""
    a, again, dz = given.results()
    count = len(given.parts)
    # While the host decides on launches it can know nothing about the rows: numbers come only as
    # those are carried out.
    places: Any = SimpleNamespace(
        experts=count, first_E=torch.full((count,), -(2**62)), counts_E=torch.full((count,), 2**30)
    )

    def arrive() -> None:
        for expert, part in enumerate(given.parts):
            places.first_E[expert] = part.start
            places.counts_E[expert] = part.stop - part.start

    space, cpu = Space("test", 1, 16, 1), torch.device("cpu")
    tiles = Tiles(4, case.features, 0, group=1, warps=4, stages=1)
    with (
        mock.patch.object(activations, "activation_tiles", lambda device: tiles),
        launches(comm, "test", space, str(case), cpu) as launch,
    ):
        launch.call(arrive)
        activations.activate(launch, places, given.z, style, a)
        activations.activate_backward(launch, places, given.z, given.da, style, again, dz)
    in_place = torch.where(given.real[:, None], given.da, KEPT)
    other_dz = torch.full_like(dz, KEPT)
    with launches(comm, "test", space, f"{case}, in place", cpu) as launch:
        activations.activate_backward(launch, places, given.z, in_place, style, in_place, other_dz)
    for found, right in ((in_place, again), (other_dz, dz)):
        torch.testing.assert_close(found, right, rtol=0.0, atol=0.0, equal_nan=True)
    return [a, again, dz]


def check(rank: int, cases: Sequence[Case]) -> None:
    comm = fc.Communicator.of()
    for case in cases:
        style = Style(case.activation, case.layout, False)
        given = Rows(case)
        found = computed(comm, case, given, style)
        real = given.real
        exact = given.z[real].double().requires_grad_()
        right = activation(exact, Mixture(activation=case.activation, layout=case.layout))
        right.backward(given.da[real].double())
        right = right.detach()
        assert exact.grad is not None
        a, dz = torch.empty_like(given.da[real]), torch.empty_like(given.z[real])
        host.activate_backward(given.z[real], given.da[real], style, a, dz)
        theirs = {"a": (right, a), "a again": (right, a), "dz": (exact.grad, dz)}
        for got, (name, (ref, other)) in zip(found, theirs.items(), strict=True):
            what = f"{case}: {name}"
            assert bool((got[~real] == KEPT).all()), f"{what}: a row of no expert was written"
            assert got.dtype == case.dtype, what
            compare(what, got[real], ref, bound(case.dtype, 20))
            compare(f"{what}, host engine", got[real], other.double(), 2 * bound(case.dtype, 20))


def check_nan(rank: int) -> None:
    """It comes out where it does on the host engine, and nowhere else."""
    for name, layout in product(ACTIVATIONS, LAYOUTS):
        case = Case(name, layout, counts=(4,), ffn=8)
        style, given = Style(name, layout, False), Rows(case)
        for row, features in ((0, given.z), (1, given.da)):
            features[row, ::3] = NAN
        a, dz = torch.empty_like(given.da[:4]), torch.empty_like(given.z[:4])
        host.activate_backward(given.z[:4], given.da[:4], style, a, dz)
        found = computed(fc.Communicator.of(), case, given, style)
        assert bool(a.isnan().any()) and not bool(a.isnan().all())
        for got, right in zip(found, (a, a, dz), strict=True):
            assert torch.equal(got[:4].isnan(), right.isnan()), f"{name}, {layout}"


def test_against_float64_and_the_host_engine(pools: Pools) -> None:
    pools(1, TRITON_INTERPRET="1").run(check, CASES, timeout_s=300)


def test_nan_stays(pools: Pools) -> None:
    pools(1, TRITON_INTERPRET="1").run(check_nan, timeout_s=100)
