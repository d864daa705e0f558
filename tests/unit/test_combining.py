"""Sums of several tensors in blocks: exact, rounded once, and in place of any of the parts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusedcomm.engines import combining

SHAPES = ((37,), (5, 7), (1, 37), (3, 0), (0,))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def right(parts: list[torch.Tensor], op: str, divisor: int) -> torch.Tensor:
    stacked = torch.stack(parts)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    wide = torch.promote_types(stacked.dtype, torch.float32)
    total = stacked[0].to(wide)
    for part in stacked[1:]:
        total = total + part
    return (total / divisor if divisor > 1 else total).to(stacked.dtype)


@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 19])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16, torch.uint8])
def test_every_form(count: int, dtype: torch.dtype, block_bytes: int) -> None:
    torch.manual_seed(0)
    with mock.patch.object(combining, "BLOCK_BYTES", block_bytes):
        for shape in SHAPES:
            for op, divisor in (("sum", 1), ("avg", max(count, 2)), ("max", 1), ("min", 1)):
                if op == "avg" and not dtype.is_floating_point:
                    continue
                # In place of none, and of each of the parts.
                for place in (None, *range(count)):
                    parts = [(torch.randn(shape) * 9).to(dtype) for _ in range(count)]
                    expected = right(parts, op, divisor)
                    own = torch.empty(shape, dtype=dtype) if place is None else parts[place]
                    others = [torch.empty(shape, dtype=dtype)] * (count > 1)
                    combining.combine(parts, [own, *others], op, divisor)
                    what = f"{shape} {op} in place of {place}"
                    assert torch.equal(own, expected), what
                    assert all(torch.equal(other, expected) for other in others), what


def test_strided_targets() -> None:
    """Columns of a larger matrix, as a reduce-scatter along the last dimension has them."""
    wide = torch.full((6, 9), -1.0)
    parts = [torch.randn(6, 9)[:, 2:5] for _ in range(3)]
    with mock.patch.object(combining, "BLOCK_BYTES", 16):
        combining.combine(parts, [wide[:, 2:5]], "sum")
    assert torch.equal(wide[:, 2:5], parts[0] + parts[1] + parts[2])
    assert (wide[:, :2] == -1).all() and (wide[:, 5:] == -1).all()
