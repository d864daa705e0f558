"""What is checked of the mixture of experts; see ``checks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedcomm as fc
from fusedcomm.engines.experts import Experts, Style
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import launches
from fusedcomm.planning.capacity import drop
from fusedcomm.planning.routing import Layout, columns_of, place, sort_choices
from fusedcomm.protocol import Space
from tests.gpu.common import DEVICE, captured, comm_of, late, settle
from tests.gpu.exchange_checks import whole

HIDDEN, FFN, EXPERTS, TOP_K = 64, 64, 5, 2
#: The most tokens of a rank, replays of a graph, and rounds of calls under skew.
TOKENS, REPLAYS, ROUNDS = 29, 6, 60


class Round(NamedTuple):
    """One rank's tokens, on the CPU; what lies behind ``number``, and behind no expert, is NaN."""

    number: int
    x: Tensor
    ids: Tensor
    weights: Tensor


class Mixture:
    """Five experts on all ranks, and tokens by the round, in bfloat16.

    There are a static number of places for tokens, of which another part is filled in every round
    and on every rank: on some all, on some none. Ids occur twice, and some name no expert.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        generator = torch.Generator().manual_seed(3)
        drawn = [(EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN)]
        self.weights = [(torch.rand(shape, generator=generator) / 8).bfloat16() for shape in drawn]
        block = -(-EXPERTS // world_size)
        self.own = slice(rank * block, (rank + 1) * block)
        self.experts = [w[self.own].to(DEVICE).requires_grad_() for w in self.weights]
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.factors = torch.zeros(TOKENS, TOP_K, device=DEVICE)
        self.ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device=DEVICE)
        self.number = torch.zeros((), dtype=torch.int32, device=DEVICE)
        self.x.requires_grad_()
        self.factors.requires_grad_()

    def data(self, number: int) -> list[Round]:
        """Every rank's tokens of a round."""
        generator = torch.Generator().manual_seed(number)
        found = []
        for rank in range(self.world_size):
            some = [TOKENS, (7 * number + 5 * rank) % TOKENS, 0][(number + rank) % 3]
            x = torch.rand(TOKENS, HIDDEN, generator=generator).bfloat16()
            ids = torch.randint(-1, EXPERTS + 1, (TOKENS, TOP_K), generator=generator)
            weights = torch.rand(TOKENS, TOP_K, generator=generator)
            x[some:] = float("nan")
            weights[some:] = float("nan")
            weights[(ids < 0) | (ids >= EXPERTS)] = float("nan")
            found.append(Round(some, x, ids, weights))
        return found

    def fill(self, number: int) -> None:
        """Put this rank's tokens of a round where the calls read them."""
        given = self.data(number)[self.rank]
        with torch.no_grad():
            self.x.copy_(given.x)
            self.factors.copy_(given.weights)
            self.ids.copy_(given.ids)
            self.number.fill_(given.number)

    def calls(self, comm: fc.Communicator) -> list[Tensor]:
        """y, and the gradients of x, the weights and the experts, of ``y.sum()``."""
        y = fc.moe_ffn(
            self.x, self.ids, self.factors, *self.experts,
            num_experts=EXPERTS, group=comm, engine="triton", num_tokens=self.number,
            capacity=TOKENS * TOP_K * self.world_size, max_tokens=TOKENS,
        )  # fmt: skip
        leaves = [self.x, self.factors, *self.experts]
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    def right(self, number: int) -> list[Tensor]:
        """The same by a dense loop in float64 on the CPU."""
        rounds = self.data(number)
        xs = [r.x[: r.number].double().requires_grad_() for r in rounds]
        factors = [r.weights[: r.number].double().requires_grad_() for r in rounds]
        w13, w2 = (w.double().requires_grad_() for w in self.weights)
        results = []
        for given, tokens, weights in zip(rounds, xs, factors, strict=True):
            chosen, result = given.ids[: given.number], tokens * 0.0
            for expert in range(EXPERTS):
                gate, up = (tokens @ w13[expert].t()).chunk(2, 1)
                taken = torch.where(chosen == expert, weights, 0.0).sum(1, keepdim=True)
                result = result + (F.silu(gate) * up) @ w2[expert].t() * taken
            results.append(result)
        torch.cat(results).sum().backward()
        dx, d_factors, d_w13, d_w2 = (
            cast(Tensor, leaf.grad) for leaf in (xs[self.rank], factors[self.rank], w13, w2)
        )
        places = TOKENS - rounds[self.rank].number
        mine = [results[self.rank].detach(), dx, d_factors]
        return [*(F.pad(t, (0, 0, 0, places)) for t in mine), d_w13[self.own], d_w2[self.own]]

    def check(self, found: list[Tensor], number: int) -> None:
        names = ("y", "dx", "dweights", "dw13", "dw2")
        for name, got, right in zip(names, found, self.right(number), strict=True):
            error = (got.double().cpu() - right).norm() / right.norm().clamp(min=1e-30)
            assert error < 0.03 or not right.numel(), f"round {number}, {name}: {error:.3g}"


def experts(rank: int, world_size: int) -> None:
    """moe_ffn, forward and backward, with and without a capacity."""
    comm = comm_of("experts")
    mixture = Mixture(rank, world_size)
    for number in range(3):
        mixture.fill(number)
        mixture.check(mixture.calls(comm), number)
        y = fc.moe_ffn(
            mixture.x, mixture.ids, mixture.factors, *mixture.experts,
            num_experts=EXPERTS, group=comm, engine="triton", num_tokens=mixture.number,
        )  # fmt: skip
        right = mixture.right(number)[0]
        error = (y.double().cpu() - right).norm() / right.norm().clamp(min=1e-30)
        assert error < 0.03, f"without capacity: {error:.3g}"
    settle()
    comm.close()


def graph_of_experts(rank: int, world_size: int) -> None:
    """Replays with other tokens, another number of them, and another routing; mixed with calls."""
    comm = comm_of("graph of experts")
    mixture = Mixture(rank, world_size)
    mixture.fill(0)
    mixture.check(mixture.calls(comm), 0)
    replay, found = captured(comm, lambda: mixture.calls(comm))
    for number in range(1, REPLAYS + 1):
        mixture.fill(number)
        for output in found:
            output.fill_(float("nan"))
        replay()
        mixture.check(found, number)
        if number % 3 == 1:
            mixture.check(mixture.calls(comm), number)
    settle()
    comm.close()


def skew_of_experts(rank: int, world_size: int) -> None:
    """Many calls while the ranks are late in turn, from counters that are about to wrap around."""
    comm = comm_of("skew of experts")
    comm.memory.first_epoch = 2**31 - 3
    mixture, wrong = Mixture(rank, world_size), torch.zeros((), dtype=torch.int64, device=DEVICE)
    x = torch.arange(TOKENS * 8, device=DEVICE).view(TOKENS, 8).float()
    inputs = [mixture.data(number)[rank] for number in range(4)]
    right = []
    for given in inputs:
        there = torch.arange(TOKENS)[:, None] < given.number
        taken = (there & (given.ids >= 0) & (given.ids < EXPERTS)).sum(1, keepdim=True)
        right.append(x * taken.to(DEVICE))
    ids = [given.ids.to(DEVICE) for given in inputs]
    room = TOKENS * TOP_K * world_size
    for number in range(ROUNDS):
        if number % (5 + rank) == rank:
            late()
        some = number % 4
        d = fc.dispatch(
            x, ids[some], None, EXPERTS, group=comm, engine="triton", capacity=room,
            max_tokens=TOKENS, num_tokens=inputs[some].number,
        )  # fmt: skip
        wrong += (fc.combine(d.x, d) != right[some]).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements of {ROUNDS} rounds are wrong"
    settle()
    comm.close()


def graph_of_dropping(rank: int, world_size: int) -> None:
    """A capacity that is too small in some replays and not in others: exactly who finds room."""
    comm = comm_of("graph of dropping")
    mixture, capacity = Mixture(rank, world_size), 48
    x = torch.arange(TOKENS * 8, device=DEVICE).view(TOKENS, 8).float()

    def calls() -> list[Tensor]:
        d = fc.dispatch(
            x, mixture.ids, None, EXPERTS, group=comm, engine="triton", overflow="drop", align=4,
            capacity=capacity, max_tokens=TOKENS, num_tokens=mixture.number,
        )  # fmt: skip
        return [fc.combine(d.x * 2.0, d), d.dropped, d.counts]

    mixture.fill(0)
    calls()
    replay, (y, dropped, counts) = captured(comm, calls)
    placement = place(EXPERTS, world_size)
    for number in range(REPLAYS):
        mixture.fill(number)
        replay()
        columns = []
        for given in mixture.data(number):
            ids = np.where(np.arange(TOKENS)[:, None] < given.number, given.ids.numpy(), -1)
            columns.append(columns_of(ids, placement))
        table = np.stack([sort_choices(own, EXPERTS)[0] for own in columns])
        kept = [drop(own, r, table, placement, 4, capacity) for r, own in enumerate(columns)]
        taken = torch.from_numpy((kept[rank] < EXPERTS).sum(1, keepdims=True))
        assert torch.equal(y.cpu(), x.cpu() * 2.0 * taken), f"replay {number}"
        lost = int((columns[rank] < EXPERTS).sum() - taken.sum())
        assert int(dropped) == lost, f"replay {number}: {int(dropped)} dropped, {lost} were"
        after = Layout(np.stack([sort_choices(own, EXPERTS)[0] for own in kept]), placement, 4)
        own = placement.columns(rank)
        assert counts.tolist() == after.counts_E[own.start : own.stop].tolist()
    settle()
    comm.close()


def graph_of_expert_gradients(rank: int, world_size: int) -> None:
    """The gradients of experts' weights and biases, replayed with other rows and other counts.

    Whatever the counts, the launches are the same. NaN in rows of no expert is not read.
    """
    comm = comm_of("graph of expert gradients")
    hidden, ffn, total = (2880, 1440, 1000) if DEVICE == "cuda" else (40, 24, 60)
    space = Space("expert gradients", 1, 16, 1)
    rows = [torch.zeros(total, n, device=DEVICE) for n in (hidden, ffn, 2 * ffn, hidden)]
    rows = [each.bfloat16() for each in rows]
    dh, a, dz, x = rows
    spreads = [(0, 0, total), (total, 0, 0), (0, 0, 0), (1, total // 2 + 1, 7), (16, 3, 30)]
    bounds = torch.zeros(2, len(spreads[0]), dtype=torch.int64, device=DEVICE)
    places: Any = SimpleNamespace(first_E=bounds[0], counts_E=bounds[1])
    w13 = dz.new_empty(len(spreads[0]), 2 * ffn, hidden)
    w2 = dz.new_empty(len(spreads[0]), ffn, hidden).transpose(1, 2)
    biases = w13.new_empty(w13.shape[:2]), w2.new_empty(w2.shape[:2])
    own = Experts(w13, w2, *biases, Style("swiglu", "gate_up", False))

    def calls() -> list[Tensor]:
        with launches(comm, "expert gradients", space, "gradients", x.device) as launch:
            found = experts_grads(launch, places, dh, a, dz, x, own, [True] * 4)
        return cast(list[Tensor], found)

    calls()
    replay, found = captured(comm, calls)
    for number, counts in enumerate(spreads):
        first, parts = 0, []
        for each in rows:
            each.fill_(float("nan"))
        for expert, count in enumerate(counts):
            parts.append(slice(first, first + count))
            bounds[:, expert] = torch.tensor([first, count])
            for n, each in enumerate(rows):
                each[parts[-1]] = whole(10 * number + n, count, each.shape[1], dtype=each.dtype)
            first += count + 5 if count else 0
        for result in found:
            result.fill_(float("nan"))
        replay()
        for expert, part in enumerate(parts):
            right = [
                dz[part].float().t() @ x[part].float(),
                dh[part].float().t() @ a[part].float(),
                dz[part].float().sum(0),
                dh[part].float().sum(0),
            ]
            for name, got, exact in zip(("dw13", "dw2", "db13", "db2"), found, right, strict=True):
                same = torch.equal(got[expert], exact.bfloat16())
                assert same, f"{name} of expert {expert}, counts {counts}"
    settle()
    comm.close()


def no_room(rank: int, world_size: int) -> None:
    """Too many rows: at once on CPUs, on GPUs by a later call, all ranks are told."""
    comm = comm_of("no room")
    x = torch.ones(4, 8, device=DEVICE)
    ids = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    options: dict[str, Any] = {"group": comm, "engine": "triton", "max_tokens": 4}
    try:
        fc.dispatch(x, ids, None, 1, capacity=4 * world_size - 1, **options)
        settle()
        comm.barrier()
    except fc.CapacityError as error:
        assert f"rank 0 would receive {4 * world_size} rows" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    if DEVICE == "cpu":
        d = fc.dispatch(x, ids, None, 1, capacity=4 * world_size, **options)
        assert int(d.counts.sum()) == (0 if rank else 4 * world_size)
    settle()
    comm.close()


def capture_without_capacity(rank: int, world_size: int) -> None:
    """It raises before anything is announced, and says what to give."""
    comm = comm_of("without capacity")
    x, ids = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)

    def calls() -> list[Tensor]:
        return [fc.dispatch(x, ids, None, 1, group=comm, engine="triton").x]

    calls()
    try:
        captured(comm, calls)
    except ValueError as error:
        assert "give capacity" in str(error), error
    else:
        raise AssertionError("a number of rows was captured")
    (rows,) = calls()
    assert rows.shape[0] == (0 if rank else 4 * world_size)
    settle()
    comm.close()


CHECKS = (
    experts,
    skew_of_experts,
    graph_of_experts,
    graph_of_dropping,
    graph_of_expert_gradients,
    no_room,
    capture_without_capacity,
)
