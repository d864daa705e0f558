"""What is checked of the collectives and of the mixture of experts; see ``checks``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812

import fusedcomm as fc
from fusedcomm.engines.experts import Experts, Style
from fusedcomm.engines.triton.experts_grads import experts_grads
from fusedcomm.engines.triton.launch import launches
from fusedcomm.protocol import Space
from tests.gpu.common import DEVICE, captured, comm_of, settle

ALGORITHMS = ("one_shot", "two_shot", "ring")
SIZES = (7, 5000)
REPLAYS = 6


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(DEVICE, dtype)


def collectives(rank: int, world_size: int) -> None:
    """Every collective, exactly; of all-reduce every algorithm that any GPU has."""
    comm = comm_of("collectives")
    options: dict[str, Any] = {"group": comm, "engine": "triton"}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            xs = [whole(10 * size + r, size, dtype=dtype) for r in range(world_size)]
            x, total = xs[rank], torch.stack(xs).float().sum(0).to(dtype)
            for algorithm in ALGORITHMS:
                y = fc.all_reduce(x, algorithm=algorithm, **options)
                assert torch.equal(y, total), (algorithm, size, dtype)
                out = x.clone()
                fc.all_reduce(out, algorithm=algorithm, out=out, **options)
                assert torch.equal(out, total), ("in place", algorithm, size, dtype)
            assert torch.equal(fc.all_gather(x, **options), torch.cat(xs))
            parts = [*total.chunk(world_size), *[total[:0]] * world_size]
            assert torch.equal(fc.reduce_scatter(x, **options), parts[rank])
            assert torch.equal(fc.broadcast(x, world_size - 1, **options), xs[-1])
            sent = [(rank + peer) % 3 for peer in range(world_size)]  # from and to each alike
            rows = [whole(100 * rank + peer, sent[peer], 33) for peer in range(world_size)]
            got = fc.all_to_all(torch.cat(rows), send_counts=sent, recv_counts=sent, **options)
            right = [whole(100 * peer + rank, sent[peer], 33) for peer in range(world_size)]
            assert torch.equal(got, torch.cat(right))
    settle()
    comm.close()


def graph_of_collectives(rank: int, world_size: int) -> None:
    """All-reduces of every algorithm and an all-gather, replayed with new data."""
    comm = comm_of("graph of collectives")
    options: dict[str, Any] = {"group": comm, "engine": "triton"}
    x = torch.zeros(1000, device=DEVICE)

    def calls() -> list[torch.Tensor]:
        found = [fc.all_reduce(x, algorithm=name, **options) for name in ALGORITHMS]
        return [*found, fc.all_gather(x, **options)]

    calls()
    replay, found = captured(calls)
    for number in range(REPLAYS):
        xs = [whole(7 * number + r, 1000) for r in range(world_size)]
        x.copy_(xs[rank])
        replay()
        for y in found[:-1]:
            assert torch.equal(y, sum(xs[1:], xs[0])), f"replay {number}"
        assert torch.equal(found[-1], torch.cat(xs)), f"replay {number}"
        if number % 3 == 0:
            calls()
    settle()
    comm.close()


def experts(rank: int, world_size: int) -> None:
    """moe_ffn, forward and backward, against a dense loop in float64 on the CPU."""
    comm = comm_of("experts")
    hidden, ffn, count, k = 64, 64, 4, 2
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(torch.bfloat16)

    w13, w2 = draw(count, 2 * ffn, hidden) / 8, draw(count, hidden, ffn) / 8
    xs = [draw(9 + 20 * r, hidden) for r in range(world_size)]
    scores = [torch.rand(len(x), count, generator=generator) for x in xs]
    weights, ids = zip(*[score.topk(k) for score in scores], strict=True)
    block = -(-count // world_size)
    own = slice(rank * block, (rank + 1) * block)
    leaves = [
        value.clone().to(DEVICE).requires_grad_()
        for value in (xs[rank], weights[rank], w13[own], w2[own])
    ]
    x, weight, up, down = leaves
    y = fc.moe_ffn(
        x, ids[rank].to(DEVICE), weight, up, down,
        num_experts=count, group=comm, engine="triton",
    )  # fmt: skip
    y.sum().backward()
    exact = [
        [value.double().requires_grad_() for value in values] for values in (xs, weights, [w13, w2])
    ]
    results = []
    for tokens, factors, chosen in zip(exact[0], exact[1], ids, strict=True):
        result = torch.zeros(len(tokens), hidden, dtype=torch.float64)
        for expert in range(count):
            gate, mine = (tokens @ exact[2][0][expert].t()).chunk(2, 1)
            h = (F.silu(gate) * mine) @ exact[2][1][expert].t()
            result = result + h * (factors * (chosen == expert)).sum(1, keepdim=True)
        results.append(result)
    torch.cat(results).sum().backward()
    dx, d_weight, d_up, d_down = (
        cast(torch.Tensor, leaf.grad)
        for leaf in (exact[0][rank], exact[1][rank], exact[2][0], exact[2][1])
    )
    right = [dx, d_weight, d_up[own], d_down[own]]
    gradients = [cast(torch.Tensor, leaf.grad) for leaf in leaves]
    pairs = [(y, results[rank]), *zip(gradients, right, strict=True)]
    for number, (got, expected) in enumerate(pairs):
        error = (got.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < 0.03 or not expected.numel(), f"result {number}: {error:.3g}"
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

    def calls() -> list[torch.Tensor]:
        with launches(comm, "expert gradients", space, "gradients", x.device) as launch:
            found = experts_grads(launch, places, *rows, own, [True] * 4)
        return cast(list[torch.Tensor], found)

    calls()
    replay, found = captured(calls)
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


CHECKS = (collectives, graph_of_collectives, experts, graph_of_expert_gradients)
