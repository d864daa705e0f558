"""Groups that are not the whole world, several at once, and what else ``group=`` may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm as fc
from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict
from fusedcomm.parallel import sync_replicated
from tests.conftest import Pools
from tests.ranks.cases import OPS, Case, Problem, call
from tests.ranks.checking import check, check_values

CASES = [Case(op, tokens, engine=engine) for op in OPS for tokens in ((7,), (1,), (3, 4))
         for engine in ("host", "plain")]  # fmt: skip


def my_group(*members: list[int]) -> Any:
    """The group, of those with these members, that this rank is in; None if it is in none."""
    mine = None
    for ranks in members:  # every rank must make every group
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def check_group(rank: int, members: list[list[int]]) -> None:
    group = my_group(*members)
    if group is None:
        with pytest.raises(ValueError, match="no member"):
            fc.Communicator.of(dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(ValueError, match="no member"):
            call(CASES[0], Problem.of(CASES[0], 1), 0, 1, dist.GroupMember.NON_GROUP_MEMBER)
        return
    mine = next(ranks for ranks in members if rank in ranks)
    comm = fc.Communicator.of(group)
    assert (comm.rank, comm.world_size) == (mine.index(rank), len(mine))
    assert fc.Communicator.of(group) is comm
    check(rank, CASES, group)
    comm.close()


@pytest.mark.parametrize(
    "members",
    [[[0, 2]], [[0, 2], [1, 3]], [[1, 2, 3]], [[3], [0, 1, 2]], [[0, 1], [2, 3]]],
    ids=str,
)
def test_some_ranks(pools: Pools, members: list[list[int]]) -> None:
    pools(4).run(check_group, members)


def check_at_once(rank: int) -> None:
    """Calls on the world, on pairs and on other pairs take turns, each with data in flight."""
    groups = [None, my_group([0, 2], [1, 3]), my_group([0, 1], [2, 3])]
    comms = [fc.Communicator.of(group) for group in groups]
    assert len(set(map(id, comms))) == 3
    for step in range(6):
        pending = []
        for comm in comms:
            case = Case(OPS[step % len(OPS)], (5 + step,), needs="", seed=step)
            problem = Problem.of(case, comm.world_size)
            found = call(case, problem, comm.rank, comm.world_size, comm)
            pending.append((case, problem, found, comm))
        for case, problem, found, comm in pending:
            check_values(case, problem, found, comm.rank, comm.world_size)
    for comm in comms[1:]:
        comm.close()


def test_several_groups_take_turns(pools: Pools) -> None:
    pools(4).run(check_at_once)


def check_layers_on_groups(rank: int) -> None:
    """A layer cut over one group, its output cut again over another: 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    torch.manual_seed(0)
    first, second = torch.nn.Linear(6, 8).double(), torch.nn.Linear(8, 5).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    y = second(first(x))
    inner, outer = mesh["inner"], mesh["outer"]
    column = ColumnParallelLinear.from_linear(first, group=inner, input_layout="replicated")
    row = RowParallelLinear.from_linear(second, group=inner, output_layout="replicated")
    torch.testing.assert_close(row(column(x)), y)
    other = RowParallelLinear.from_linear(second, group=outer, output_layout="replicated")
    column = ColumnParallelLinear.from_linear(first, group=outer, input_layout="replicated")
    torch.testing.assert_close(other(column(x)), y)
    norm = torch.nn.LayerNorm(6).double()
    sync_replicated(norm, outer)
    norm(x * (rank + 1)).sum().backward()
    assert norm.bias.grad is not None
    assert torch.equal(norm.bias.grad, torch.full((6,), 6.0, dtype=torch.float64))
    for layer, linear in ((row, second), (column, first)):
        for name, value in full_state_dict(layer).items():
            assert torch.equal(value, linear.state_dict()[name]), name


def check_meshes(rank: int) -> None:
    line = init_device_mesh("cpu", (4,))
    check(rank, CASES[:8], line)
    assert fc.Communicator.of(line).world_size == 4
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, mine in (("tp", rank % 2), ("dp", rank // 2)):
        assert fc.Communicator.of(square[name]).rank == mine
        check(rank, CASES[:8], square[name])
    for use in (fc.Communicator.of, lambda group: ColumnParallelLinear(2, 2, group=group)):
        with pytest.raises(ValueError, match="DeviceMesh of 2 dimensions"):
            use(square)
    for wrong in ("tp", 3, [0, 1]):
        with pytest.raises(ValueError, match="group must be a ProcessGroup"):
            fc.Communicator.of(wrong)


def test_device_meshes(pools: Pools) -> None:
    pools(4).run(check_meshes)


def test_layers_on_the_dimensions_of_a_mesh(pools: Pools) -> None:
    pools(4).run(check_layers_on_groups)


def check_again(rank: int, store_path: str) -> None:
    """The default group is destroyed and made again in the same process."""
    world_size = dist.get_world_size()
    first = fc.Communicator.of()
    check(rank, CASES[:4])
    layer = RowParallelLinear(4, 4)
    for round in range(2):
        dist.barrier()
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="init_process_group"):
            fc.Communicator.of()
        store = dist.FileStore(f"{store_path}/{round}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        second = fc.Communicator.of()
        assert second is not first and second.world_size == world_size
        assert second in fc.Communicator.live() and first not in fc.Communicator.live()
        with pytest.raises(fc.ClosedError):
            first.barrier()
        with pytest.raises(fc.ClosedError):
            fc.linear_all_reduce(torch.ones(2, 4), torch.ones(2, 4), group=first)
        check(rank, CASES[:4])
        first = second
    assert layer.comm is not first


def test_the_default_group_made_again(pools: Pools, tmp_path: Any) -> None:
    pool = pools(2)
    pool.run(check_again, str(tmp_path))
    pool.restart()  # its default group lies in files that go with this test
