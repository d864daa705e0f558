"""Runs checks on ranks that share one GPU, or have one each; needs torch and triton only.

A check is a function of ``(rank, world_size)`` that is called on every rank at the same time and
raises where something is wrong. The ranks are started once for many checks. A check that fails does
not end them: its communicators are closed, and the next check makes new ones. A rank that dies or
hangs ends the run; what was found until then is kept.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.ranks import Emit, RankError, launch
from fusedcomm.symmetric.devices import LEAST_CAPABILITY, OVERLAPPING

Check = Callable[[int, int], None]

#: What the ranks need in their environment: several on one GPU, and exact cuBLAS calls.
ENVIRONMENT = {OVERLAPPING: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Result:
    """How a check ended: ``problem`` is empty if all is well."""

    name: str
    seconds: float
    problem: str = ""


def lacking() -> str | None:
    """Why no check can run here, in one sentence; None if they can."""
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else "with CUDA, but finds no GPU"
        return f"there is no NVIDIA GPU to use (torch {torch.__version__} is built {built})"
    if torch.version.hip is not None:
        return "this is a ROCm build of torch; the kernels' waits are for NVIDIA GPUs so far"
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"{torch.cuda.get_device_name()} is older than compute capability {least}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 has kernels run on the CPU; unset it"
    return None


def run(
    checks: Mapping[str, Check],
    world_size: int,
    *,
    devices: int = 1,
    timeout_s: float = 300.0,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run checks on ``world_size`` ranks.

    Args:
        checks: importable functions, by name; run in this order.
        devices: how many GPUs the ranks are dealt to; with 0, they are CPU ranks.
        timeout_s: for all of them together; those that are not reached fail.
        on_result: told of every result as it comes.
    """
    found: dict[str, Result] = {}

    def note(rank: int, event: Any) -> None:
        if rank == 0:
            found[event.name] = event
            on_result(event)

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    problem = "was not reached"
    try:
        launch(
            _work, world_size, dict(checks), devices, on_event=note, threads=4, timeout_s=timeout_s
        )
    except RankError as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    for name in checks:
        if name not in found:
            found[name] = Result(name, 0.0, problem)
            on_result(found[name])
            problem = "was not reached"  # only the first one is to blame
    return [found[name] for name in checks]


def _work(rank: int, emit: Emit, checks: Mapping[str, Check], devices: int) -> None:
    """One rank: every check, its end agreed upon by all."""
    if devices:
        torch.cuda.set_device(rank % devices)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    world_size = dist.get_world_size()
    for name, check in checks.items():
        dist.barrier()
        torch.manual_seed(0)
        start = time.monotonic()
        mine = ""
        try:
            check(rank, world_size)
            if devices:
                torch.cuda.synchronize()
        except Exception as error:  # told to all ranks below
            mine = f"rank {rank}: {error!r}\n{traceback.format_exc()}"
            for comm in fc.Communicator.live():
                comm.abort(f"{name} failed")
        problems: list[str] = [""] * world_size
        dist.all_gather_object(problems, mine)
        if any(problems):
            for comm in fc.Communicator.live():
                comm.close()
        failed = _first(problems)
        emit(Result(name, time.monotonic() - start, failed))
        if "CUDA error" in failed:
            raise RuntimeError(f"the GPU is unusable after {name}: {failed}")


def _first(problems: Sequence[str]) -> str:
    """The problem that says most: one that does not only follow from another rank's."""
    told = [text for text in problems if text]
    own = [text for text in told if "AbortedError" not in text.splitlines()[0]]
    return (own or told or [""])[0]
