"""What is checked of the layer with a mixture of experts; see ``checks``."""

from __future__ import annotations

import torch
from torch import Tensor

import fusedcomm as fc
from tests.gpu.common import DEVICE, captured, comm_of, settle
from tests.gpu.expert_checks import EXPERTS, FFN, HIDDEN, REPLAYS, TOKENS, TOP_K, Mixture


def graph_of_layer(rank: int, world_size: int) -> None:
    """Replays with other numbers of tokens, NaN behind them, are what eager calls are."""
    comm = comm_of("graph of a layer")
    torch.manual_seed(0)
    moe = fc.nn.MoE(
        HIDDEN, FFN, EXPERTS, TOP_K, group=comm, engine="triton",
        capacity=TOKENS * TOP_K * world_size, max_tokens=TOKENS,
        # What is called beside a mixture leaves a note in CPU memory, also on a GPU; where all
        # memory is the CPU's, the stand-in for graphs takes reading it for a look at the GPU's.
        shared_ffn=FFN if DEVICE == "cuda" else None,
        device=DEVICE, dtype=torch.bfloat16,
    )  # fmt: skip
    mixture = Mixture(rank, world_size)

    def calls() -> list[Tensor]:
        y, routing = moe(mixture.x, num_tokens=mixture.number, return_routing=True)
        leaves = [mixture.x, *moe.experts.parameters()]
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return [y.detach(), routing.ids, *grads]

    mixture.fill(0)
    calls()
    replay, found = captured(comm, calls)
    for number in range(1, REPLAYS + 1):
        mixture.fill(number)
        for output in found:
            output.fill_(-7)
        replay()
        settle()
        got = [output.clone() for output in found]
        tokens = int(mixture.number)
        y, ids = got[:2]
        assert not y[tokens:].any() and bool((ids[tokens:] == -1).all()), f"replay {number}"
        for result, right in zip(got, calls(), strict=True):
            assert torch.equal(result, right), f"replay {number}: differs from an eager call"
    settle()
    comm.close()


CHECKS = (graph_of_layer,)
