"""fc.nn.MoE on one dimension of a mesh, FSDP2 on the other."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusedcomm.nn import MoE, full_state_dict, load_full_state_dict
from fusedcomm.parallel import sync_replicated
from tests.conftest import Pools
from tests.ranks.checking import relative_error

HIDDEN, FFN, EXPERTS, TOP_K = 12, 10, 6, 2


class Model(nn.Module):
    def __init__(self, group: object, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        options = {"shared_ffn": 8, "shared_gate": True, "group": group, **options}
        self.moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.before(x))


def check(rank: int) -> None:
    """Two data ranks, each two expert ranks: FSDP averages over the former, with all gradients
    complete over the latter, and the parameters after a step are those of all tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("apart", "alone"))["alone"]
    tokens = [
        torch.randn(3 + r, HIDDEN, generator=torch.Generator().manual_seed(r)) for r in range(4)
    ]
    whole, cut = Model(alone), Model(mesh["expert"])
    # Half the sum over all ranks is the mean over data ranks of the sums over their expert ranks.
    whole(torch.cat(tokens)).square().sum().div(2).backward()
    with torch.no_grad():
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter -= 0.05 * parameter.grad

    sync_replicated(cut.before, mesh["expert"])
    own = copy.deepcopy(cut.moe.experts)
    fully_shard(cut.moe, mesh=mesh["data"])
    fully_shard(cut, mesh=mesh["data"])
    optimizer = torch.optim.SGD(cut.parameters(), lr=0.05)
    for half in tokens[rank].tensor_split(2):  # gradients are accumulated
        cut(half).square().sum().backward()
    optimizer.step()
    for (name, found), right in zip(cut.named_parameters(), whole.parameters(), strict=True):
        if name.startswith("moe.experts."):
            right = own.own_part(name.removeprefix("moe.experts."), right)
        error = relative_error(found.full_tensor(), right)
        assert error < 1e-5, f"{name}: {error}"


def test_experts_on_one_dimension_and_fsdp_on_the_other(pools: Pools) -> None:
    pools(4).run(check)


def check_state(rank: int) -> None:
    """The state dict of the whole, out of and into experts of which FSDP has cut each rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    for placement in (None, [1, 0, 0, 1, 0, 0], [1] * EXPERTS):
        cut = Model(mesh["expert"], placement=placement)
        right = full_state_dict(cut)
        fully_shard(cut.moe, mesh=mesh["data"])
        fully_shard(cut, mesh=mesh["data"])
        for turn in ("as made", "as loaded"):
            found = full_state_dict(cut)
            assert found.keys() == right.keys()
            for name, value in right.items():
                assert torch.equal(found[name], value), f"{name} {turn}, placed {placement}"
            with torch.no_grad():
                for parameter in cut.parameters():
                    parameter.zero_()
            load_full_state_dict(cut, right)


def test_state_of_experts_that_fsdp_has_cut(pools: Pools) -> None:
    pools(4).run(check_state)
