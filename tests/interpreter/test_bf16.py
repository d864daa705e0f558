"""The mended interpreter computes as PyTorch does, bit for bit; the one from the shelf does not."""

from __future__ import annotations

import warnings

import pytest
import torch

WIDTH = 64


def _values(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Finite values of every size, among them ties, subnormals and neighbours of overflow."""
    bits = torch.randint(-(2**15), 2**15, (4 * count,), dtype=torch.int16).view(dtype)
    return bits[bits.isfinite()][:count]


def _launch(kernel, count, *args, **constants):
    kernel[(-(-count // WIDTH),)](*args, count, SIZE=WIDTH, **constants)


def _arithmetic(rank: int, mended: bool, dtype: torch.dtype) -> dict[str, tuple]:
    """Every operation's name -> (what the kernel gave, what torch gives)."""
    from fusedcomm.engines.triton.interpreter import install

    if mended:
        install()
        install()
    from tests.interpreter import arithmetic_kernels as kernels

    found: dict[str, tuple] = {}
    a, b = _values(dtype, 999), _values(dtype, 999)
    b[:99] = a[:99]
    out = torch.zeros(len(kernels.BINARY), 999, dtype=dtype)
    expected = [
        a + b,
        a - b,
        a * b,
        (a.float() / b.float()).to(dtype),
        torch.minimum(a, b),
        torch.maximum(a, b),
        torch.where(a < b, a, a + b),
        a.abs(),
    ]
    _launch(kernels.binary_kernel, 999, a, b, out)
    found |= dict(zip(kernels.BINARY, zip(out, expected, strict=True), strict=True))

    wide = torch.randint(-(2**31), 2**31, (4000,), dtype=torch.int64).to(torch.int32)
    wide = wide.view(torch.float32)
    ties = (torch.arange(64, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32)
    ties16 = (torch.arange(64, dtype=torch.int32) * 0x1000 + 0x3F800000).view(torch.float32)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 65519.0])
    wide = torch.cat([wide, ties, ties16, special, torch.randn(500), torch.randn(500) * 1e-6])
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    whole = torch.randint(-(2**20), 2**20, (999,), dtype=torch.int32)
    small = torch.randint(-300, 300, (999,)).to(dtype)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    for name, source, target in (
        ("from float32", wide, dtype),
        ("from float64", torch.randn(999, dtype=torch.float64), dtype),
        ("from int32", whole, dtype),
        ("to float32", every, torch.float32),
        ("to float64", every, torch.float64),
        ("to the other half", every, other),
        ("to int32", small, torch.int32),
        ("to bool", small, torch.bool),
    ):
        result = torch.zeros(source.shape, dtype=target)
        _launch(kernels.cast_kernel, len(source), source, result)
        found[name] = result, source.to(target)
    result = torch.zeros(wide.shape, dtype=dtype)
    _launch(kernels.round_kernel, len(wide), wide, result)
    found["rounded"] = result, wide.to(dtype)

    # Small multiples of 1/8 add up exactly in float32, in any order, but not in 16 bits.
    left = (torch.randint(-40, 40, (16, 64)) / 8).to(dtype)
    right = (torch.randint(-40, 40, (64, 32)) / 8).to(dtype)
    init = torch.randint(-40, 40, (16, 32)) / 8
    for name, target in (("dot", torch.float32), ("dot, rounded", dtype)):
        result = torch.zeros(16, 32, dtype=target)
        kernels.dot_kernel[(1,)](left, right, init, result, M=16, N=32, K=64)
        found[name] = result, (init + left.float() @ right.float()).to(target)

    summands = (torch.randint(0, 200, (16, 32)) / 8).to(dtype)
    result = torch.zeros(16, 4, dtype=dtype)
    kernels.reduce_kernel[(1,)](summands, result, M=16, N=32)
    total = summands.sum(1)
    for column, (name, reference) in enumerate(
        {"sum": total, "max": summands.amax(1), "min": summands.amin(1), "reduce": total}.items()
    ):
        if name != "reduce" or dtype == torch.bfloat16:  # float16: rounded at every step
            found[name] = result[:, column], reference

    few = _values(dtype, 16)
    padded = torch.cat([few[:10], torch.full((6,), 3.25, dtype=dtype)])
    result = torch.zeros(2, 16, dtype=dtype)
    kernels.masked_kernel[(1,)](few, result, 10, SIZE=16)
    found["masked load"] = result, torch.stack([padded, padded + padded])
    if mended or dtype != torch.bfloat16:  # unmended, there are no constants of bfloat16
        result = torch.zeros(3, 16, dtype=dtype)
        kernels.constant_kernel[(1,)](few, result, SIZE=16)
        full = torch.full((16,), 1.5, dtype=dtype)
        found["constants"] = result, torch.stack([full, few * 2.5 + 0.75, 0.0 - few])
    return found


def _wrong(found: dict[str, tuple]) -> dict[str, str]:
    """The operations whose results differ, and where first."""
    wrong = {}
    for name, (result, expected) in found.items():
        assert result.dtype == expected.dtype
        if result.dtype.is_floating_point:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[result.dtype.itemsize]
            same = (result.view(bits) == expected.view(bits)) | (result.isnan() & expected.isnan())
        else:
            same = result == expected
        if not same.all():
            first = (~same).nonzero()[0]
            wrong[name] = f"{result[tuple(first)]} is not {expected[tuple(first)]} at {first}"
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_equals_torch(pools, dtype):
    found = pools(1, TRITON_INTERPRET="1").run(_arithmetic, True, dtype)[0]
    assert _wrong(found) == {}


def test_it_is_needed(pools):
    """The interpreter as it comes is wrong; a Triton in which this fails needs the shim no more."""
    pool = pools(1, TRITON_INTERPRET="1")
    pool.restart()  # ranks in which nothing was mended yet
    wrong = _wrong(pool.run(_arithmetic, False, torch.bfloat16)[0])
    assert wrong.keys() >= {"add", "mul", "where", "from float32", "from int32", "dot", "sum"}


def _count_over_the_edge(rank: int) -> tuple[list[int], list[int]]:
    from fusedcomm.engines.triton.interpreter import install

    install()
    from tests.interpreter import arithmetic_kernels as kernels

    last, first = 2**31 - 1, -(2**31)
    flags = torch.tensor([last, first, last, first, 5], dtype=torch.int32)
    wanted = torch.tensor([first, last, last - 1, first + 1, 5], dtype=torch.int32)
    out = torch.zeros(5, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        kernels.counter_kernel[(1,)](flags, wanted, out, 5)
    return out.tolist(), flags.tolist()


def test_counters_wrap_around_silently(pools):
    reached, flags = pools(1, TRITON_INTERPRET="1").run(_count_over_the_edge)[0]
    assert reached == [0, 1, 1, 0, 1]
    first = -(2**31)
    assert flags == [first, first + 1, first, first + 1, 6]
