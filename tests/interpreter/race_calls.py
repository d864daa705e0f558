"""Calls of every operation, for the race checker; rank functions, with a fault if one is named."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import fusedcomm as fc
from fusedcomm.ops.library import tensor_parallel as library
from fusedcomm.planning import tensor_parallel as planning
from fusedcomm.protocol import Workspace
from fusedcomm.schedule import shard_bounds
from fusedcomm.testing.races.recording import replaced

CALLS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the calls are made.

    Attributes:
        tokens: T, cut among the ranks.
        inner, outer: K and N.
        pieces: signalled pieces of a rank's chunk.
        chunked: whether the host engine cuts its products at the ranks' chunks.
        one_shot: whether an all-reduce may be done in one exchange.
        copies: whether rows are copied beside the kernels, as copy engines do it.
        same_slot: use slot 0 for all calls, as a captured graph would.
    """

    engine: str
    tokens: int = 10
    inner: int = 24
    outer: int = 20
    pieces: int = 1
    chunked: bool = True
    one_shot: bool = True
    same_slot: bool = True
    copies: bool = False


@contextlib.contextmanager
def arranged(setting: Setting) -> Iterator[None]:
    """Have calls planned as ``setting`` says."""

    def plan(*args: Any, **kwargs: Any) -> planning.Plan:
        chosen = original(*args, **kwargs)
        return dataclasses.replace(chosen, pieces=setting.pieces, copies=setting.copies)

    original = library.plan
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(library, plan=plan))
        rows = 1 if setting.chunked else 1 << 30
        stack.enter_context(replaced(planning, MIN_CHUNK_ROWS=rows))
        if setting.engine == "triton":
            from fusedcomm.engines.triton import config

            stack.enter_context(replaced(config, _INTERPRETED=16))  # more tiles and programs
        bytes_ = 1 << 30 if setting.one_shot else -1
        stack.enter_context(replaced(planning, ONE_SHOT_BYTES=bytes_, is_one_shot=_by_size))
        if setting.same_slot:
            stack.enter_context(replaced(Workspace, take_slot=lambda self: 0))
        yield


def _by_size(bounds: list[tuple[int, int]], row_bytes: int) -> bool:
    return bounds[-1][1] * row_bytes <= planning.ONE_SHOT_BYTES


def calls(rank: int, world_size: int, setting: Setting, ops: tuple[str, ...]) -> None:
    """``CALLS`` rounds of the operations, forward and, where there is one, backward."""
    with arranged(setting):
        for _ in range(CALLS):
            for op in ops:
                _OPS[op](rank, world_size, setting)


def faulty_calls(
    rank: int, world_size: int, setting: Setting, ops: tuple[str, ...], fault: str
) -> None:
    """As ``calls``, with a fault planted; see ``race_faults``."""
    from tests.interpreter import race_faults

    with race_faults.FAULTS[fault]():
        calls(rank, world_size, setting, ops)


def _rows(rank: int, world_size: int, setting: Setting) -> int:
    start, stop = shard_bounds(setting.tokens, world_size)[rank]
    return stop - start


def _gather(rank: int, world_size: int, setting: Setting) -> None:
    rows = _rows(rank, world_size, setting)
    x = torch.randn(rows, setting.inner, requires_grad=True)
    weight = torch.randn(setting.outer, setting.inner, requires_grad=True)
    bias = torch.randn(setting.outer, requires_grad=True)
    y, gathered = fc.all_gather_linear(
        x,
        weight,
        bias,
        gathered_size=setting.tokens,
        return_gathered=True,
        engine=setting.engine,
    )
    (y.sum() + gathered.sum()).backward()


def _gather_forward(rank: int, world_size: int, setting: Setting) -> None:
    x = torch.randn(_rows(rank, world_size, setting), setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    fc.all_gather_linear(x, weight, gathered_size=setting.tokens, engine=setting.engine)


def _gather_reused(rank: int, world_size: int, setting: Setting) -> None:
    """The input's memory is written anew for every call."""
    x = torch.empty(_rows(rank, world_size, setting), setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    for _ in range(CALLS):
        x.normal_()
        fc.all_gather_linear(x, weight, gathered_size=setting.tokens, engine=setting.engine)


def _gather_in_place(rank: int, world_size: int, setting: Setting) -> None:
    comm = fc.Communicator.of()
    x = comm.symmetric_empty(setting.tokens // world_size, setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    for _ in range(CALLS):
        x.local.normal_()
        fc.all_gather_linear(x.local, weight, engine=setting.engine)


def _scatter(rank: int, world_size: int, setting: Setting) -> None:
    x = torch.randn(setting.tokens, setting.inner, requires_grad=True)
    weight = torch.randn(setting.outer, setting.inner, requires_grad=True)
    bias = torch.randn(setting.outer, requires_grad=True)
    fc.linear_reduce_scatter(x, weight, bias, engine=setting.engine).sum().backward()


def _scatter_forward(rank: int, world_size: int, setting: Setting) -> None:
    x = torch.randn(setting.tokens, setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    fc.linear_reduce_scatter(x, weight, engine=setting.engine)


def _reduce(rank: int, world_size: int, setting: Setting) -> None:
    x = torch.randn(setting.tokens, setting.inner, requires_grad=True)
    weight = torch.randn(setting.outer, setting.inner, requires_grad=True)
    fc.linear_all_reduce(x, weight, engine=setting.engine).sum().backward()


def _two_channels(rank: int, world_size: int, setting: Setting) -> None:
    """The same operation on two communicators in turn: two workspaces of one layout.

    Their epochs are always equal, so that no rank waits forever where flags are shared.
    """
    x = torch.randn(setting.tokens, setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    for channel in ("one", "two"):
        comm = fc.Communicator.of(channel=channel)
        fc.linear_reduce_scatter(x, weight, group=comm, engine=setting.engine)


def _wrapping(rank: int, world_size: int, setting: Setting) -> None:
    """On a communicator whose counters begin just before they wrap around."""
    comm = fc.Communicator.of(channel=f"wraps, {setting.engine}")
    comm.memory.first_epoch = 2**31 - 3
    x = torch.randn(setting.tokens, setting.inner)
    weight = torch.randn(setting.outer, setting.inner)
    rows = _rows(rank, world_size, setting)
    arguments = {"group": comm, "engine": setting.engine}
    fc.all_gather_linear(x[:rows], weight, gathered_size=setting.tokens, **arguments)
    fc.linear_reduce_scatter(x, weight, **arguments)
    fc.linear_all_reduce(x, weight, **arguments)


def _replicated(rank: int, world_size: int, setting: Setting) -> None:
    x = torch.randn(setting.tokens, setting.inner, requires_grad=True)
    weight = torch.randn(setting.outer, setting.inner, requires_grad=True)
    fc.replicated_linear(x, weight, engine=setting.engine).sum().backward()


_OPS = {
    "all_gather_linear": _gather,
    "all_gather_linear, forward": _gather_forward,
    "all_gather_linear, reused input": _gather_reused,
    "all_gather_linear, in place": _gather_in_place,
    "linear_reduce_scatter": _scatter,
    "linear_reduce_scatter, forward": _scatter_forward,
    "linear_all_reduce": _reduce,
    "replicated_linear": _replicated,
    "two channels": _two_channels,
    "wrap-around": _wrapping,
}
EVERY_OP = tuple(_OPS)
