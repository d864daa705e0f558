"""The usual path: permute, count exchange, all-to-all, experts, all-to-all, unpermute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from fusedcomm.benchmarks._moe.problem import EXPERTS, FFN

#: (rows [R, hidden], rows of each expert, memory for the result or None) -> [R, hidden]
Experts = Callable[[torch.Tensor, list[int], torch.Tensor | None], torch.Tensor]


class Sent(NamedTuple):
    """Rows sorted by local expert, and what brings them back."""

    rows: torch.Tensor
    counts: list[int]
    order: torch.Tensor  # of the choices, when sent
    arranged: torch.Tensor  # of what arrived
    in_splits: list[int]
    out_splits: list[int]


def dispatch(x: torch.Tensor, ids: torch.Tensor) -> Sent:
    world_size, flat = dist.get_world_size(), ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    in_splits = counts.view(world_size, -1).sum(1).tolist()
    table = theirs.view(world_size, -1)
    out_splits = table.sum(1).tolist()
    permuted = x.index_select(0, order // ids.shape[1])
    arrived = x.new_empty(sum(out_splits), x.shape[1])
    dist.all_to_all_single(arrived, permuted, out_splits, in_splits)
    local = torch.arange(table.shape[1]).repeat(world_size)
    arranged = torch.argsort(torch.repeat_interleave(local, theirs), stable=True)
    rows = arrived.index_select(0, arranged)
    return Sent(rows, table.sum(0).tolist(), order, arranged, in_splits, out_splits)


def combine(h: torch.Tensor, sent: Sent, weights: torch.Tensor) -> torch.Tensor:
    leaving = h.index_select(0, torch.argsort(sent.arranged))
    back = h.new_empty(sum(sent.in_splits), h.shape[1])
    dist.all_to_all_single(back, leaving, sent.in_splits, sent.out_splits)
    rows = back.index_select(0, torch.argsort(sent.order))
    tokens, top_k = weights.shape
    terms = rows.view(tokens, top_k, h.shape[1]).float()
    return torch.bmm(weights.unsqueeze(1), terms).squeeze(1).to(h.dtype)


def moe_ffn(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts
) -> torch.Tensor:
    sent = dispatch(x, ids)
    return combine(experts(sent.rows, sent.counts, None), sent, weights)


def loop_of_mm(w13: torch.Tensor, w2: torch.Tensor) -> Experts:
    """A product for each expert."""

    def run(rows: torch.Tensor, counts: list[int], out: torch.Tensor | None) -> torch.Tensor:
        h, begin = torch.empty_like(rows) if out is None else out, 0
        for expert, count in enumerate(counts):
            part = slice(begin, begin + count)
            z = torch.mm(rows[part], w13[expert].t())
            a = F.silu(z[:, :FFN]).mul_(z[:, FFN:])
            torch.mm(a, w2[expert].t(), out=h[part])
            begin += count
        return h

    return run


def grouped_mm(w13: torch.Tensor, w2: torch.Tensor) -> Experts:
    """torch's grouped product, which makes its own memory."""

    def run(rows: torch.Tensor, counts: list[int], out: torch.Tensor | None) -> torch.Tensor:
        offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        z = F.grouped_mm(rows, w13.transpose(1, 2), offs=offs)
        a = F.silu(z[:, :FFN]).mul_(z[:, FFN:])
        return F.grouped_mm(a, w2.transpose(1, 2), offs=offs)

    return run


EXPERTS_BY = {"loop of mm": loop_of_mm, "grouped_mm": grouped_mm}
