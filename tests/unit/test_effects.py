"""Every custom op in which ranks meet is known to compilers as an effect, in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton

import fusedcomm as fc
from fusedcomm.ops.library.effects import communicates

#: Those that a rank computes on its own.
LOCAL = {
    f"fusedcomm::{name}"
    for name in (
        "cross_entropy_grad", "own_shard", "replicated_linear", "sum_gradient",
    )
}  # fmt: skip


def registered() -> set[str]:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.startswith("fusedcomm::")}


def test_every_op_that_communicates_is_marked() -> None:
    assert fc.all_gather_linear is not None
    names = registered()
    assert len(names) > 6 and names > LOCAL
    marked = {name for name in names if singleton.find(name).effect.effect is EffectType.ORDERED}
    forgotten = names - marked - LOCAL
    assert not forgotten, f"set @communicates above {sorted(forgotten)}, or list them in LOCAL"
    assert not marked & LOCAL


def test_an_op_that_writes_into_an_argument_is_refused() -> None:
    @torch.library.custom_op("fusedcomm_test::writes", mutates_args=("x",))
    def writes(x: Tensor) -> None:
        x.zero_()

    with pytest.raises(ValueError, match="fusedcomm_test::writes writes into an argument"):
        communicates(writes)
