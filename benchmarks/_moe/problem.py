"""Tokens, routings and experts that every rank can make for every other, and the right results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from fusedcomm.benchmarks._tensor_parallel import inputs

EXPERTS, HIDDEN, FFN = 16, 1024, 512


@dataclass(frozen=True)
class Problem:
    """One rank's part. x [T, hidden], ids and weights [T, k], its experts' weights.

    ``ids_of[r]`` are rank r's ids.
    """

    rank: int
    x: torch.Tensor
    ids_of: list[torch.Tensor]
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        return self.ids_of[self.rank]

    @property
    def own(self) -> slice:
        """This rank's experts."""
        local = EXPERTS // len(self.ids_of)
        return slice(self.rank * local, (self.rank + 1) * local)

    def counts(self) -> list[int]:
        """Rows of each of this rank's experts, of all ranks' tokens."""
        everywhere = torch.cat([ids.flatten() for ids in self.ids_of])
        return torch.bincount(everywhere, minlength=EXPERTS)[self.own].tolist()


def choose(seed: int, tokens: int, top_k: int, routing: str) -> torch.Tensor:
    """Distinct experts for every token [tokens, top_k].

    "balanced": all equally often. "skewed": drawn without replacement with probabilities that fall
    as 1, 1/2, 1/3 …, so that the first rank has most of the work.
    """
    if routing == "balanced":
        return (torch.arange(tokens * top_k) + seed).view(tokens, top_k) % EXPERTS
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, EXPERTS, generator=generator).clamp_(min=1e-9)
    scores = -torch.log(-torch.log(uniform)) - torch.log(torch.arange(1.0, EXPERTS + 1))
    return scores.topk(top_k, dim=1).indices


def prepare(
    rank: int, world_size: int, tokens: int, top_k: int, routing: str, dtype: torch.dtype
) -> Problem:
    if EXPERTS % world_size:
        raise ValueError(f"{EXPERTS} experts are spread evenly: --ranks must divide it")
    ids = [choose(r, tokens, top_k, routing) for r in range(world_size)]
    generator = torch.Generator().manual_seed(1000 + rank)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    local = EXPERTS // world_size
    own = range(rank * local, (rank + 1) * local)
    w13 = [inputs.weight(e, 2 * FFN, HIDDEN, dtype) for e in own]
    w2 = [inputs.weight(EXPERTS + e, HIDDEN, FFN, dtype) for e in own]
    x = inputs.tokens(rank, tokens, HIDDEN, dtype)
    return Problem(rank, x, ids, weights, torch.stack(w13), torch.stack(w2))


def expected(problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """y of this rank's tokens, in float32 and a loop over all experts.

    float32 rounds 1e5 times finer than the dtypes measured, and is far faster than float64.
    """
    x = problem.x.float()
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, choice = (problem.ids == expert).nonzero(as_tuple=True)
        w13 = inputs.weight(expert, 2 * FFN, HIDDEN, dtype).float()
        w2 = inputs.weight(EXPERTS + expert, HIDDEN, FFN, dtype).float()
        gate, up = F.linear(x[token], w13).chunk(2, 1)
        rows = F.linear(F.silu(gate) * up, w2)
        y.index_add_(0, token, rows * problem.weights[token, choice, None])
    return y.double()
