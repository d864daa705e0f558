"""Which engine an operation uses, and why."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fusedcomm.communicator import Communicator

ENGINES = ("auto", "triton", "host", "plain")
#: Those that overlap inside the domains of a group that has several.
ACROSS = ("triton", "host")


def choose_engine(
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    *,
    kernels: bool = True,
    across: tuple[str, ...] = (),
) -> tuple[str, str]:
    """The engine for one call, and a sentence of reason; warns where overlap is lost.

    Args:
        device, dtype: of the tensors.
        engine: what the caller asked for, one of ``ENGINES``.
        kernels: whether there are any for the operation.
        across: the engines that have a form of it for several domains.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    if engine == "plain":
        return "plain", "the plain engine was asked for"
    obstacle = _obstacle(comm, device, dtype, engine, kernels, across)
    if obstacle is None and engine != "auto":
        return engine, f"the {engine} engine was asked for"
    if obstacle is None:
        chosen, kind = ("triton", "GPU") if device.type == "cuda" else ("host", "CPU")
        if comm.inside is not None:
            reached = "; overlapped inside each domain, torch.distributed between them"
        elif chosen == "triton":
            reached = " of ranks that reach each other's memory"
        else:
            reached = " of ranks that share memory"
        return chosen, f"{kind} tensors{reached}"
    if engine != "auto":
        raise ValueError(f'engine="{engine}" cannot serve this call: {obstacle}')
    warnings.warn(f"fusedcomm runs without overlap: {obstacle}", stacklevel=2)
    return "plain", obstacle


def overlaps(
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    *,
    across: tuple[str, ...] = (),
) -> bool:
    """Whether ``choose_engine`` chooses another engine than "plain", or raises."""
    if engine != "auto":
        return engine != "plain"
    return _obstacle(comm, device, dtype, engine, True, across) is None


def _obstacle(
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    kernels: bool,
    across: tuple[str, ...],
) -> str | None:
    """Why an overlapped engine cannot serve; ``auto`` means the device's own."""
    meant = engine if engine != "auto" else "triton" if device.type == "cuda" else "host"
    if comm.inside is not None and meant not in across:
        whose = "its kernels serve" if meant == "triton" else "this operation overlaps within"
        return f"{whose} one domain, and the group has several"
    if not comm.shares_memory and comm.inside is None:
        return "the group's ranks do not share memory, and form no domains of one size above 1"
    if device.type == "cuda" and not kernels:
        return "this operation has no kernels yet"
    if device.type == "cuda":
        return _gpu_obstacle(comm, device, dtype, engine)
    if device.type != "cpu":
        return f"the overlapped engines serve tensors on CPUs and NVIDIA GPUs, not {device.type}"
    if engine == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return (
                "CPU tensors run its kernels in Triton's interpreter: set TRITON_INTERPRET=1 "
                "before Python starts"
            )
        return _dtype_obstacle(dtype)
    return None


def _gpu_obstacle(
    comm: Communicator, device: torch.device, dtype: torch.dtype, engine: str
) -> str | None:
    """Why the Triton engine cannot serve GPU tensors."""
    if engine == "host":
        return 'the host engine serves CPU tensors; for GPU tensors there is engine="triton"'
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 has kernels interpreted on the CPU: unset it to use the GPU"
    return _dtype_obstacle(dtype) or comm.reach(device).obstacle


def _dtype_obstacle(dtype: torch.dtype) -> str | None:
    return "its kernels take float32, float16 and bfloat16" if dtype == torch.float64 else None
