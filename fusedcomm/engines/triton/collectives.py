"""Collectives on the Triton engine: pushed by kernels, or by one that goes round a ring.

Each function is one call or, for a tensor larger than a slot may be, one call per *window* of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.communicator import Communicator
from fusedcomm.engines.counts import check_all_counts
from fusedcomm.engines.triton.exchanging import alignment, alone, common, numbers, windows
from fusedcomm.engines.triton.launch import launches
from fusedcomm.engines.triton.reducing import all_reduce, reduce_scatter
from fusedcomm.gpu import refuse_counts
from fusedcomm.kernels import collectives as kernels
from fusedcomm.planning import exchanges
from fusedcomm.planning.collectives import Plan
from fusedcomm.planning.exchanges import exchange_space, pieces_of

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

Bounds = list[tuple[int, int]]


def all_gather(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, bounds: Bounds) -> None:
    """``out[:, bounds[r]] = x of rank r``."""
    if comm.world_size == 1:
        alone(comm, plan, x, out)
        return
    x, out = numbers(x), numbers(out)
    rows = out.shape[0]
    # Columns that are not all of a row are gathered as rows of their own, and put in their places.
    flat = out if rows <= 1 else out.new_empty(out.shape)
    shard = bounds[0][1] * rows
    _exchange(
        comm, plan, "all_gather", x.reshape(-1), flat.view(-1),
        send=(0, shard), receive=(shard, shard), widest=shard,
    )  # fmt: skip
    if rows > 1:
        at = 0
        for start, stop in bounds:
            count = rows * (stop - start)
            out[:, start:stop] = flat.view(-1)[at : at + count].view(rows, stop - start)
            at += count


def all_to_all(
    comm: Communicator,
    plan: Plan,
    x: Tensor,
    out: Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
) -> None:
    """``out`` is the concatenation of the rows that every rank has for this one.

    With counts the host waits for the other ranks' counts.

    Raises:
        ValueError: counts are given while a graph is captured.
        MismatchError: another rank sends not what this one expects.
    """
    if comm.world_size == 1:
        alone(comm, plan, x, out)
        return
    x, out = numbers(x), numbers(out)
    inner = x.shape[1]
    if send_counts is None or recv_counts is None:
        part = x.numel() // comm.world_size
        send = receive = (part, part)
        _exchange(
            comm, plan, "all_to_all", x.view(-1), out.view(-1),
            send=send, receive=receive, widest=part,
        )  # fmt: skip
        return
    counts = _exchange_counts(comm, plan, send_counts, recv_counts, x.device)
    widest = max(map(max, counts)) * inner
    tables = tuple(_begins(c, inner, x.device) for c in (send_counts, recv_counts))
    _exchange(comm, plan, "all_to_all", x.view(-1), out.view(-1), widest=widest, tables=tables)


def broadcast(comm: Communicator, plan: Plan, x: Tensor, out: Tensor, src: int) -> None:
    """``out = x of src``; both flat."""
    if comm.world_size == 1:
        alone(comm, plan, x, out)
        return
    x, out = numbers(x), numbers(out)
    size = x.numel()
    if comm.rank != src:
        x = x[:0]  # What it holds does not matter, and out may be x.
    _exchange(
        comm, plan, "broadcast", x, out, send=(0, size), receive=(0, size), widest=size, root=src
    )


def _exchange(
    comm: Communicator,
    plan: Plan,
    op: str,
    x: Tensor,
    out: Tensor,
    *,
    widest: int,
    send: tuple[int, int] = (0, 0),
    receive: tuple[int, int] = (0, 0),
    tables: tuple[Tensor, ...] = (),
    root: int = -1,
) -> None:
    """Every rank's part for each other one, window by window.

    Args:
        widest: elements of the largest part of all ranks.
        send, receive: how far apart the parts of x and of out begin, and how long they are.
        tables: where they begin instead, int64 ``[W + 1]`` each.
        root: the rank that alone has something to send, if not -1.
    """
    for start, stop in windows(widest, exchanges.WINDOW_BYTES // x.dtype.itemsize):
        window = stop - start
        cut = pieces_of(x.device, window)
        space = exchange_space(comm.world_size, window * x.dtype.itemsize, cut.number)
        if tables:
            source, target = x, out
            places = _places("send", start, window, 0) | _places("recv", start, window, 0)
        else:
            source, target = x[min(start, x.numel()) :], out[min(start, out.numel()) :]
            places = _places("send", send[0], window, source.numel())
            places |= _places("recv", receive[0], window, target.numel())
        with launches(comm, op, space, plan.text, x.device) as launch:
            launch.run(
                kernels.exchange_kernel,
                (2 * comm.world_size - 1) * cut.number,
                "copy",
                "push and take",
                x=source,
                out=target,
                send_table=tables[0] if tables else launch.ranks["bases"],
                recv_table=tables[1] if tables else launch.ranks["bases"],
                root=root,
                TABLE=bool(tables),
                SEND_ALIGN=alignment(source, send[0], tables),
                RECV_ALIGN=alignment(target, receive[0], tables),
                **places,
                **common(launch, cut),
            )


def _places(side: str, stride: int, size: int, total: int) -> dict[str, int]:
    return {f"{side}_stride": stride, f"{side}_size": size, f"{side}_total": total}


def _exchange_counts(
    comm: Communicator,
    plan: Plan,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    device: torch.device,
) -> list[list[int]]:
    """``counts[a][b]``: how many rows rank a has for rank b."""
    refuse_counts()
    size, both = comm.world_size, 2 * comm.world_size
    table = torch.empty(size * both, dtype=torch.int64, device=device)
    mine = torch.tensor([*send_counts, *recv_counts], device=device)
    _exchange(
        comm, plan, "all_to_all", mine, table, send=(0, both), receive=(both, both), widest=both
    )
    return check_all_counts(table.view(size, both).tolist())


def _begins(counts: Sequence[int], inner: int, device: torch.device) -> Tensor:
    """Where parts of ``counts`` rows begin, and where the last ends: int64 ``[W + 1]``."""
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count * inner)
    return torch.tensor(begins, device=device)
