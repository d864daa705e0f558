"""The measurements of ``make gpu-check``, on CPU: every path computes what cuBLAS does."""

from __future__ import annotations

import pytest
import torch


def _problems(rank: int, spoil: str) -> list[str]:
    from fusedcomm.benchmarks._gpu_check.measure import Product, Setup
    from fusedcomm.engines.triton.interpreter import install

    install()
    setup = Setup(Product("small", 64, 48, 40), torch.device("cpu"), torch.float32)
    if spoil == "rows of a peer":
        setup.part(0, 3, 8, 40)[0, 0] += 100
    elif spoil == "a flag":
        setup._bases[5] = setup._bases[4]
    return setup.problems()


@pytest.mark.parametrize("spoil", ["", "rows of a peer", "a flag"])
def test_paths(pools, spoil):
    found = pools(1, TRITON_INTERPRET="1").run(_problems, spoil)[0]
    assert (found == []) == (spoil == ""), found
    if spoil:
        told = {"rows of a peer": "waiting", "a flag": "flag on rank 5 is 0"}[spoil]
        assert any(told in problem for problem in found)
