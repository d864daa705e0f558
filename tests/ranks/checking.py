"""What a call's results must satisfy, and the circumstances in which it is tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusedcomm as fc
from fusedcomm.ops.library import tensor_parallel as library
from fusedcomm.planning import tensor_parallel as planning
from fusedcomm.protocol import Workspace
from tests.ranks.cases import Case, Local, Problem, call, expected

#: The most pieces that a chunk is cut into by these tests.
MAX_PIECES = 3
#: Calls between two poisonings of the slots, which cost more time than a call.
POISON_EVERY = 3


def bound(dtype: torch.dtype, k: int, roundings: int = 1) -> float:
    """The largest legal ``‖out − ref‖ / ‖ref‖`` of a sum of ``k`` products.

    Rounding to ``dtype`` changes an element by at most u, half of its epsilon, relatively, so
    ``roundings`` of the whole result (the ranks' partials on the wire count once together: their
    errors add up like they do) by at most as many u. Below that, products are added in float32
    (float64 for float64), each addition with an error of at most that type's u: the textbook's
    ``k u``. Inputs are rounded before the reference is computed, and cost nothing.
    """
    accumulator = torch.promote_types(dtype, torch.float32)
    u, inner = torch.finfo(dtype).eps / 2, torch.finfo(accumulator).eps / 2
    return roundings * u + (k + 2) * inner


def compare(what: str, got: Tensor, ref: Tensor, limit: float) -> None:
    """Raise unless ``got`` has the shape of ``ref`` (float64) and is within ``limit`` of it.

    A limit of 0 demands equality after rounding ``ref`` to the dtype.
    """
    assert got.shape == ref.shape, f"{what}: shape {list(got.shape)}, expected {list(ref.shape)}"
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    if limit == 0.0:
        wrong = (got != ref.to(got.dtype)).nonzero()
        assert not len(wrong), f"{what}: {len(wrong)} of {ref.numel()} differ, first {wrong[:3]}"
        return
    error = relative_error(got, ref)
    assert error <= limit, f"{what}: relative error {error:.3g} exceeds the bound {limit:.3g}"


def relative_error(got: Tensor, ref: Tensor) -> float:
    """``‖got − ref‖ / ‖ref‖``; 0 for two zeros."""
    difference = (got.double() - ref.double()).norm().item()
    return difference / ref.double().norm().item() if difference else 0.0


def check_values(case: Case, problem: Problem, found: Local, rank: int, world_size: int) -> None:
    """Every result and gradient is within its bound of the unsharded one."""
    right = expected(case, problem, rank, world_size)
    rows = math.prod(case.tokens)
    # How many products are added up, and how often they may be rounded: partials on the wire and
    # the sum; once per weight and incoming gradient of x; once per chunk of a weight's gradient;
    # and at every hop where torch.distributed adds.
    hops = world_size if case.engine == "plain" else 0
    limits = {
        "y": bound(case.dtype, case.k, 2 + hops),
        "dx": bound(case.dtype, sum(case.ns) + world_size, 2 + len(case.ns) + hops),
        "dw": bound(case.dtype, rows, world_size * MAX_PIECES),
        "db": bound(case.dtype, rows),
        "ga": 0.0,
    }
    for name, got in found.results().items():
        got = got.cpu()
        what = f"{case}: {name} on rank {rank} of {world_size}"
        assert got.dtype == case.dtype, f"{what}: dtype {got.dtype}"
        key = name[:1] if name[0] == "y" else name[:2]
        compare(what, got, right[name], 0.0 if case.values == "ones" else limits[key])


def storage_range(tensor: Tensor) -> range:
    """The addresses of a tensor's memory."""
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def check_own_memory(case: Case, found: Local, comm: fc.Communicator) -> None:
    """No result shares memory with an input, another result, or symmetric memory."""
    taken = {f"input {name}": storage_range(x) for name, x in found.inputs.items()}
    for kind, workspace in workspaces(comm):
        for owner, segment in enumerate(workspace.segments):
            taken[f"{kind} of rank {owner}"] = range(
                segment.address, segment.address + segment.size
            )
    for name, result in found.results().items():
        mine = storage_range(result)
        for other, theirs in taken.items():
            assert not overlap(mine, theirs), f"{case}: {name} shares memory with {other}"
        taken[name] = mine


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory that torch hands out uninitialised is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def workspaces(comm: fc.Communicator) -> list[tuple[str, Workspace]]:
    """The communicator's workspaces, or its domain's, where it has several."""
    return list((comm.inside or comm).memory.workspaces.items())


def poison_slots(comm: fc.Communicator) -> None:
    """Fill this rank's part of every workspace's data with NaN; call it between two barriers."""
    for _, workspace in workspaces(comm):
        rank = comm.rank if comm.inside is None else comm.inside.rank
        segment, start = workspace.segments[rank], workspace._data
        segment.tensor(start, (segment.size - start,), torch.uint8).fill_(255)
    _settle(comm)


def _settle(comm: fc.Communicator) -> None:
    """Wait until this rank's GPU is done, if its calls run on one."""
    if any(workspace.device.type == "cuda" for _, workspace in workspaces(comm)):
        torch.cuda.synchronize()


@contextmanager
def planned(
    *,
    min_chunk_rows: int | None = None,
    one_shot_bytes: int | None = None,
    pieces: int = 1,
    copies: bool = False,
) -> Iterator[None]:
    """Plans as for larger problems, so that small ones reach the same code. For all ranks alike."""
    decide = library.plan

    def plan(*args: Any, **kwargs: Any) -> planning.Plan:
        return replace(decide(*args, **kwargs), pieces=pieces, copies=copies)

    with (
        mock.patch.object(library, "plan", plan),
        mock.patch.multiple(
            planning,
            MIN_CHUNK_ROWS=planning.MIN_CHUNK_ROWS if min_chunk_rows is None else min_chunk_rows,
            ONE_SHOT_BYTES=planning.ONE_SHOT_BYTES if one_shot_bytes is None else one_shot_bytes,
        ),
    ):
        yield


def check(rank: int, cases: Sequence[Case], group: Any = None) -> None:
    """Check every case in turn, on memory full of NaN; no later call may change its results."""
    comm = fc.Communicator.of(group) if not isinstance(group, fc.Communicator) else group
    world_size, kept = comm.world_size, []
    for number, case in enumerate(cases):
        problem = Problem.of(case, world_size)
        if number % POISON_EVERY == 0:
            _settle(comm)
            comm.barrier()
            poison_slots(comm)
            comm.barrier()
        try:
            with poisoned():
                found = call(case, problem, comm.rank, world_size, group)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, fc.AbortedError):
                raise  # the other rank's failure says more
            raise AssertionError(f"{case} on rank {rank} of {world_size}: {error!r}") from error
        check_values(case, problem, found, comm.rank, world_size)
        check_own_memory(case, found, comm)
        copies = {name: result.detach().clone() for name, result in found.results().items()}
        kept.append((number, case, found, copies))
    for number, case, found, copies in kept:
        for name, result in found.results().items():
            assert torch.equal(result, copies[name]), (
                f"case {number}, {case}: {name} on rank {rank} changed after the call returned"
            )


def check_planned(rank: int, cases: Sequence[Case], plans: dict[str, Any]) -> None:
    """``check`` under ``planned(**plans)``."""
    with planned(**plans):
        check(rank, cases)


@contextmanager
def calls(comm: fc.Communicator) -> Iterator[list[str]]:
    """What is issued on ``comm``, in order."""
    texts: list[str] = []
    post = comm._watch.post

    def noting(text: str) -> None:
        texts.append(text)
        post(text)

    comm._watch.post = noting  # type: ignore[method-assign]
    try:
        yield texts
    finally:
        comm._watch.post = post  # type: ignore[method-assign]
