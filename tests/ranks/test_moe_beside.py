"""What moe_ffn computes beside itself, while rows are on their way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedcomm as fc
from fusedcomm.engines.host.rows import arriving
from tests.conftest import Pools

HIDDEN, FFN, EXPERTS, TOP_K = 8, 6, 5, 2


def arguments(rank: int, world_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    local = len(torch.arange(EXPERTS).chunk(world_size)[rank])
    tokens = 3 + 2 * rank

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return {
        "x": drawn(tokens, HIDDEN),
        "topk_ids": torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator),
        "topk_weights": drawn(tokens, TOP_K),
        "w13": drawn(local, 2 * FFN, HIDDEN),
        "w2": drawn(local, HIDDEN, FFN),
        "num_experts": EXPERTS,
    }


def gradients(y: Tensor, call: dict[str, Any]) -> list[Tensor]:
    wanted = [call[name] for name in ("x", "topk_weights", "w13", "w2")]
    return list(torch.autograd.grad(y.square().sum(), wanted))


def check_rows_are_there(rank: int) -> None:
    """Every rank sends before it calls beside: there, all ranks' rows have come."""
    comm = fc.Communicator.of()
    call = arguments(rank, comm.world_size)
    plain = fc.moe_ffn(**call)
    expected = gradients(plain, call)
    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def beside() -> Tensor:
        dist.barrier()
        (rows,) = comm.calls.aside.values()
        coming = [piece for found in arriving(rows._routed, rank) for piece in found]
        assert coming and all(map(rows.has, coming))
        return factor * call["x"].sum()

    for _ in range(3):  # both slots, and the first one again
        y, result = fc.moe_ffn(**call, beside=beside)
        assert torch.equal(y, plain) and not comm.calls.aside
        for got, right in zip(gradients(y, call), expected, strict=True):
            assert torch.equal(got, right)
        (slope,) = torch.autograd.grad(result, factor)
        assert torch.equal(slope, call["x"].sum())
    with torch.no_grad():
        assert torch.equal(fc.moe_ffn(**call, beside=beside)[0], plain)


def check_other_engines(rank: int, engine: str) -> None:
    comm = fc.Communicator.of()
    call = arguments(rank, comm.world_size)
    call |= {n: v.float() for n, v in call.items() if n in ("x", "topk_weights", "w13", "w2")}
    y, result = fc.moe_ffn(**call, beside=lambda: "done", engine=engine)
    torch.testing.assert_close(y, fc.moe_ffn(**call, engine="host"))
    assert result == "done"


def check_another_inside(rank: int) -> None:
    """Another mixture may run beside on a channel of its own; on the same one it is refused."""
    comm = fc.Communicator.of(channel="outer")
    call = arguments(rank, comm.world_size)
    plain = fc.moe_ffn(**call, group=comm)
    y, inner = fc.moe_ffn(**call, group=comm, beside=lambda: fc.moe_ffn(**call))
    assert torch.equal(y, plain) and torch.equal(inner, plain)
    with pytest.raises(ValueError, match="must use another channel"):
        fc.moe_ffn(**call, group=comm, beside=lambda: fc.moe_ffn(**call, group=comm))
    comm.close()


def check_error(rank: int) -> None:
    """One rank's beside raises: the other's call ends, too, with the reason."""
    comm = fc.Communicator.of(channel="failing")
    call = arguments(rank, comm.world_size)

    def beside() -> None:
        if rank == 0:
            raise KeyError("shared weights")

    expected = (KeyError, "shared") if rank == 0 else (fc.AbortedError, "raised KeyError")
    with pytest.raises(expected[0], match=expected[1]):
        fc.moe_ffn(**call, group=comm, beside=beside)
    with pytest.raises(fc.FusedcommError):
        fc.moe_ffn(**call, group=comm)
    comm.close()


class Watching(nn.Module):
    """A shared expert that sees whether the rows have set out."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(fc.Communicator.of().calls.aside) == 1
        return x


def check_module(rank: int) -> None:
    moe = fc.nn.MoE(HIDDEN, FFN, EXPERTS, TOP_K, shared_ffn=Watching())
    x = torch.randn(4, HIDDEN)
    without = moe.experts(x, *reversed(moe.router(x)[1:]))
    assert torch.equal(moe(x), without + x)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_are_on_their_way(pools: Pools, world_size: int) -> None:
    pools(world_size).run(check_rows_are_there)


def test_a_shared_expert_runs_beside_the_experts(pools: Pools) -> None:
    pools(2).run(check_module)


def test_other_engines(pools: Pools) -> None:
    pools(2).run(check_other_engines, "plain")
    pools(2, TRITON_INTERPRET="1").run(check_other_engines, "triton")


def test_another_mixture_inside(pools: Pools) -> None:
    pools(2).run(check_another_inside)


def test_an_error_ends_every_ranks_call(pools: Pools) -> None:
    pools(2).run(check_error, timeout_s=20)
