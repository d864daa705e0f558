"""Calls of every collective against what one process computes; run on the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm.planning import collectives as planning
from fusedcomm.programs import ALGORITHMS
from fusedcomm.protocol import workspace
from fusedcomm.protocol.rotation import Rotation
from tests.ranks.cases import shard, strided
from tests.ranks.checking import overlap, poison_slots, poisoned, storage_range

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def draw(seed: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    low = -8 if dtype.is_signed else 0
    return torch.randint(low, 8, tuple(shape), generator=generator).to(dtype)


def reduced(xs: Sequence[Tensor], op: str) -> Tensor:
    """The right result of a reduction: exact, then rounded once."""
    stacked = torch.stack(list(xs))
    if op == "max":
        return stacked.amax(0)
    if op == "min":
        return stacked.amin(0)
    wide = stacked.double() if stacked.dtype.is_floating_point else stacked.long()
    total = wide.sum(0) if op == "sum" else wide.mean(0)
    return total.to(stacked.dtype)


def counts_of(seed: int, world_size: int) -> list[list[int]]:
    """``counts[a][b]``: rows from rank a for rank b; some are 0."""
    return [[(3 * a + 2 * b + seed) % 4 for b in range(world_size)] for a in range(world_size)]


class Checker:
    """Calls collectives of one communicator and compares, exactly."""

    def __init__(self, comm: fc.Communicator, engine: str = "host", layout: str = "") -> None:
        self.comm, self.engine, self.layout = comm, engine, layout
        self.rank, self.world_size = comm.rank, comm.world_size
        self._kept: list[tuple[str, Tensor, Tensor]] = []

    def inputs(self, seed: object, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [draw((seed, rank), shape, dtype) for rank in range(self.world_size)]

    def call(self, name: str, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Call it on memory full of NaN; check that the result shares no memory."""
        if x.dim() and x.dtype.is_floating_point and options.get("out") is not x:
            x = strided(x, self.layout)
        with poisoned():
            y = getattr(fc, name)(x, *args, group=self.comm, engine=self.engine, **options)
        if options.get("out") is None:
            mine = storage_range(y)
            assert not overlap(mine, storage_range(x)), f"{name}: the result is the input"
            for workspace in self.comm.memory.workspaces.values():
                for segment in workspace.segments:
                    taken = range(segment.address, segment.address + segment.size)
                    assert not overlap(mine, taken), f"{name}: the result lies in the workspace"
        return y

    def same(self, what: str, got: Tensor, right: Tensor) -> None:
        assert got.dtype == right.dtype and got.shape == right.shape, f"{what}: {got.shape}"
        wrong = (got != right).sum().item()
        assert not wrong, f"{what} on rank {self.rank}: {wrong} of {right.numel()} are wrong"
        self._kept.append((what, got, got.clone()))

    def finish(self) -> None:
        """Results must not have changed since."""
        for what, got, copy in self._kept:
            assert torch.equal(got, copy), f"{what} on rank {self.rank} changed afterwards"
        self._kept.clear()

    def all_reduce(self, shape, dtype=torch.float32, op="sum", algorithm="auto") -> None:
        what = f"all_reduce {list(shape)} {dtype} {op} {algorithm} {self.engine}"
        xs = self.inputs(what, shape, dtype)
        right = reduced(xs, op)
        rounded = op == "avg" and self.world_size == 3  # thirds: not exact where hops round
        y = self.call("all_reduce", xs[self.rank], op=op, algorithm=algorithm)
        if rounded:
            torch.testing.assert_close(y, right)
            right = y
        self.same(what, y, right)
        z = xs[self.rank].clone()
        assert self.call("all_reduce", z, op=op, algorithm=algorithm, out=z) is z
        self.same(f"{what} in place", z, right)

    def reduce_scatter(self, shape, dim=0, dtype=torch.float32, op="sum") -> None:
        what = f"reduce_scatter {list(shape)} dim {dim} {dtype} {op} {self.engine}"
        xs = self.inputs(what, shape, dtype)
        right = shard(reduced(xs, op), dim, self.rank, self.world_size)
        y = self.call("reduce_scatter", xs[self.rank], dim=dim, op=op)
        if op == "avg" and self.world_size == 3:
            torch.testing.assert_close(y, right)
            right = y
        self.same(what, y, right)
        out = torch.empty_like(right, memory_format=torch.contiguous_format)
        assert self.call("reduce_scatter", xs[self.rank], dim=dim, op=op, out=out) is out
        self.same(f"{what} out", out, right)

    def all_gather(self, shape, dim=0, dtype=torch.float32) -> None:
        what = f"all_gather {list(shape)} dim {dim} {dtype} {self.engine}"
        full = draw(what, shape, dtype)
        x = shard(full, dim, self.rank, self.world_size)
        self.same(what, self.call("all_gather", x, dim=dim, gathered_size=shape[dim]), full)
        out = torch.empty_like(full)
        size = shape[dim]
        assert self.call("all_gather", x, dim=dim, gathered_size=size, out=out) is out
        self.same(f"{what} out", out, full)

    def all_to_all(self, inner, seed=0, dtype=torch.float32, equal=False) -> None:
        what = f"all_to_all {list(inner)} {seed} {dtype} {equal} {self.engine}"
        counts = [[seed] * self.world_size] * self.world_size
        options: dict[str, Any] = {}
        if not equal:
            counts = counts_of(seed, self.world_size)
            options["send_counts"] = counts[self.rank]
            options["recv_counts"] = [counts[source][self.rank] for source in range(len(counts))]
        xs = [
            draw((what, source), [sum(counts[source]), *inner], dtype)
            for source in range(self.world_size)
        ]
        parts = [x.split(count)[self.rank] for x, count in zip(xs, counts, strict=True)]
        right = torch.cat(parts)
        self.same(what, self.call("all_to_all", xs[self.rank], **options), right)
        out = torch.empty_like(right)
        assert self.call("all_to_all", xs[self.rank], out=out, **options) is out
        self.same(f"{what} out", out, right)

    def broadcast(self, shape, src, dtype=torch.float32) -> None:
        what = f"broadcast {list(shape)} {src} {dtype} {self.engine}"
        xs = self.inputs(what, shape, dtype)
        self.same(what, self.call("broadcast", xs[self.rank], src), xs[src])
        z = xs[self.rank].clone()
        assert self.call("broadcast", z, src, out=z) is z
        self.same(f"{what} in place", z, xs[src])

    def every_op(self, shape, dtype=torch.float32) -> None:
        """One of each, on ``shape``, over every dimension."""
        self.all_reduce(shape, dtype)
        for dim in range(len(shape)):
            self.all_gather(shape, dim, dtype)
            self.reduce_scatter(shape, dim, dtype)
        self.all_to_all(shape[1:], len(shape), dtype)
        self.all_to_all(shape[1:], shape[0], dtype, equal=True)
        for src in {0, self.world_size - 1}:
            self.broadcast(shape, src, dtype)


SHAPES = ((8,), (3, 5), (7, 2, 3), (0, 4), (5, 0), (1,), (64, 33))


@contextmanager
def small_slots(nbytes: int | None) -> Iterator[None]:
    """Have tensors go through in pieces of this size. For all ranks alike."""
    if nbytes is None:
        yield
        return
    with mock.patch.object(planning, "piece_bytes", lambda world_size: nbytes):
        yield


@contextmanager
def going_round(on: bool) -> Iterator[None]:
    """Have this rank, in new workspaces, go round their banks for good, or never.

    Every rank calls this, as if each had a core of its own.
    """

    class Fixed(Rotation):
        def __init__(self) -> None:
            super().__init__()
            self.on = on

        def judge(self, writing_s: float, whole_s: float) -> None: ...

    planning.space.cache_clear()
    with (
        mock.patch.object(planning, "_CORES", 1 << 10),
        mock.patch.object(workspace, "Rotation", Fixed),
    ):
        yield
    planning.space.cache_clear()


def check_shapes(rank: int, engine: str, slot_bytes: int | None, group: Any = None) -> None:
    comm = group if isinstance(group, fc.Communicator) else fc.Communicator.of(group)
    with small_slots(slot_bytes):
        for layout in ("", "steps", "transposed"):
            checker = Checker(comm, engine, layout)
            for shape in SHAPES:
                if engine == "host":
                    comm.barrier()
                    poison_slots(comm)
                    comm.barrier()
                checker.every_op(shape)
            checker.all_reduce(())
            checker.broadcast((), 0)
            checker.finish()


def check_dtypes(rank: int, engine: str) -> None:
    checker = Checker(fc.Communicator.of(), engine)
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for op in ("sum", "avg", "max", "min"):
            if dtype == torch.bool and op in ("sum", "avg"):
                continue
            if op == "avg" and not dtype.is_floating_point:
                continue
            checker.all_reduce((11,), dtype, op)
            checker.all_reduce((3, 40), dtype, op)
            checker.reduce_scatter((3, 5), 1, dtype, op)
        checker.all_gather((5, 3), 1, dtype)
        checker.all_to_all((2,), 1, dtype)
        checker.broadcast((3, 2), 0, dtype)
    checker.finish()


def check_algorithms(rank: int, slot_bytes: int | None) -> None:
    checker = Checker(fc.Communicator.of())
    with small_slots(slot_bytes):
        for algorithm in ALGORITHMS:
            for size in (0, 1, 3, 29, 256):
                for op in ("sum", "avg", "max"):
                    for dtype in (torch.float32, torch.bfloat16, torch.int32):
                        if op != "avg" or dtype != torch.int32:
                            checker.all_reduce((size,), dtype, op, algorithm)
    checker.finish()


def bits(rank: int, algorithm: str, dtype: torch.dtype, size: int) -> Tensor:
    """The result of values whose sum depends on the order, as bytes."""
    generator = torch.Generator().manual_seed(rank)
    x = (torch.randn(size, generator=generator) * 10).to(dtype)
    return fc.all_reduce(x, algorithm=algorithm).view(torch.uint8)
