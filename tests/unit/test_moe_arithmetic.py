"""Sums over choices, and the experts' activations and their gradients, without any processes."""

from __future__ import annotations

import math
from itertools import product
from unittest import mock

import pytest
import torch

from fusedcomm.engines import choices, experts
from fusedcomm.engines.choices import dot_choices, sum_choices
from fusedcomm.engines.experts import ACTIVATIONS, LAYOUTS, Style, activate, activate_backward
from tests.ranks.checking import bound, compare
from tests.ranks.moe_cases import Case, activation

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [40, 1 << 19], ids=["few rows at a time", "all rows at once"])
def test_sums_against_float64(dtype: torch.dtype, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.rand(60, 20, generator=generator) + 0.5).to(dtype)
    for k, weighted, masked in product((1, 3, 9), (True, False), (0.0, 0.4, 1.0)):
        slot = torch.randint(0, 60, (13, k), generator=generator)
        missing = torch.rand(13, k, generator=generator) < masked
        slot[missing] = -1
        weights = torch.rand(13, k, generator=generator, dtype=torch.float64) + 0.5
        terms = rows[slot.clamp(min=0)].double() * (~missing).unsqueeze(2)
        factors = weights.float().double() if weighted else torch.ones_like(weights)
        right = (terms * factors.unsqueeze(2)).sum(1)
        given = weights.float().masked_fill(missing, math.nan) if weighted else None
        with mock.patch.object(choices, "_BLOCK", block):
            y, kept = sum_choices(rows, slot, given, True)
        assert y.dtype == dtype
        compare(f"k={k}", y, right, bound(dtype, k))
        assert torch.equal(kept[~missing], rows[slot[~missing]])
        dy = (torch.rand(13, 20, generator=generator) + 0.5).to(dtype)
        dw = dot_choices(kept, slot, dy, torch.float64)
        compare("weights", dw, (terms * dy.double().unsqueeze(1)).sum(2), bound(torch.float32, 20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_not_rounded_to_the_rows_dtype(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0], [-1.0]]).to(dtype)
    weights = torch.tensor([[1.0 + 2.0**-20, 1.0], [1.0, 1.0 - 2.0**-24]])
    y, _ = sum_choices(rows, torch.tensor([[0, 1], [0, 1]]), weights, False)
    assert y[:, 0].double().tolist() == [2.0**-20, 2.0**-24]


def test_sums_of_nothing() -> None:
    for tokens, k, rows in ((0, 2, 5), (3, 2, 0)):
        slot = torch.full((tokens, k), -1)
        y, kept = sum_choices(torch.full((rows, 4), math.nan), slot, None, True)
        assert y.shape == (tokens, 4) and kept.shape == (tokens, k, 4)
        assert not y.any() and not kept.any()


@pytest.mark.parametrize(("kind", "layout"), list(product(ACTIVATIONS, LAYOUTS)))
def test_activations_and_their_gradients(kind: str, layout: str) -> None:
    case = Case(activation=kind, layout=layout)
    style = Style(kind, layout, False)
    generator = torch.Generator().manual_seed(0)
    width = 5 if kind == "relu2" else 10
    for dtype, block in product(DTYPES, (20, 1 << 18)):
        # Large enough for gpt-oss's limits.
        wide = torch.randn(30, width, generator=generator, dtype=torch.float64) * 6.0
        z = wide.to(dtype)
        exact = z.double().clone().requires_grad_()
        right = activation(exact, case)
        da = torch.randn(30, 5, generator=generator, dtype=torch.float64).to(dtype)
        right.backward(da.double())
        a, dz = torch.empty_like(da), torch.empty_like(z)
        with mock.patch.object(experts, "_BLOCK", block):
            activate(z, style, a)
            compare("a", a, right.detach(), bound(dtype, 20))
            again = da.clone()
            activate_backward(z, again, style, again, dz)  # a may take the place of its gradient
        compare("a, once more", again, right.detach(), bound(dtype, 20))
        assert exact.grad is not None
        compare("dz", dz, exact.grad, bound(dtype, 20))
