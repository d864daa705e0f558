"""Blocks cut by plans under ``torch.compile`` and ``torch.export``."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

import fusedcomm as fc
from fusedcomm.nn import ColumnParallelLinear, GatedMLP, RowParallelLinear
from tests.conftest import Pools
from tests.ranks.dtensor_models import (
    HIDDEN,
    Block,
    check_step,
    cut_decoder,
    mesh_of,
    plan,
    whole_decoder,
)


def check_compiled(rank: int, cut: bool, local: bool, backend: str, lengths: tuple) -> None:
    """No graph break, same loss and gradients for every length, few graphs."""
    torch._dynamo.reset()
    counters.clear()
    model, right = cut_decoder(mesh_of(), cut, 1, local=local), whole_decoder(1)
    # A compiled block can be checkpointed from outside.
    model.checkpointing = right.checkpointing = None if local else False
    model.layers[0].compile(fullgraph=True, dynamic=True, backend=backend)
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
        for length in lengths:
            check_step(f"{length} tokens", model, right, (length,))
    # Shards of unequal size are another case; of each there may be one with fixed sizes at first.
    assert 1 <= counters["stats"]["unique_graphs"] <= 3, counters["stats"]


@pytest.mark.parametrize(
    ("cut", "local", "backend"),
    [(False, True, "inductor"), (True, True, "aot_eager"), (True, False, "aot_eager")],
)
def test_a_compiled_block(pools: Pools, cut: bool, local: bool, backend: str) -> None:
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("Inductor needs a C++ compiler, and there is no g++")
    lengths = (8, 12, 10, 16) if local else (8, 9, 12, 7, 10)
    pools(2).run(check_compiled, cut, local, backend, lengths, timeout_s=280)


class Pair(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(HIDDEN, 10, input_layout=layout)
        self.second = RowParallelLinear(10, HIDDEN, output_layout=layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def check_exported(rank: int) -> None:
    """The forward, with any number of tokens, in both of torch's ways to trace."""
    for layout in ("sharded", "replicated"):
        for block in (GatedMLP(HIDDEN, 10, layout=layout), Pair(layout)):
            for strict in (False, True):
                tokens = torch.export.Dim("tokens", min=2, max=64)
                program = torch.export.export(
                    block,
                    (torch.randn(4, HIDDEN),),
                    dynamic_shapes={"x": {0: tokens}},
                    strict=strict,
                )
                exported = program.module()
                for count in (4, 7, 12):
                    x = torch.randn(count, HIDDEN)
                    torch.testing.assert_close(exported(x), block(x))


def check_exported_plan(rank: int) -> None:
    """The same of a block whose parameters are DTensors."""
    torch.manual_seed(0)
    block = Block()
    whole = plan(False)
    ours = {key.removeprefix("layers.*."): style for key, style in whole.items() if "." in key}
    fc.parallelize_module(block, mesh_of(), ours)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(
        block, (torch.randn(2, 4, HIDDEN),), dynamic_shapes={"x": {1: tokens}}, strict=False
    )
    exported = program.module()
    for count in (4, 7):
        x = torch.randn(2, count, HIDDEN)
        torch.testing.assert_close(exported(x), block(x))


def test_export(pools: Pools) -> None:
    pools(2).run(check_exported, timeout_s=120)


def test_export_of_a_planned_block(pools: Pools) -> None:
    pools(2).run(check_exported_plan, timeout_s=120)
