"""Which engine an operation uses, and why."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fusedcomm.communicator import Communicator

ENGINES = ("auto", "triton", "host", "plain")


def choose_engine(
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    *,
    kernels: bool = True,
    across: bool = False,
) -> tuple[str, str]:
    """The engine for one call, and a sentence of reason; warns where overlap is lost.

    Args:
        device, dtype: of the tensors.
        engine: what the caller asked for, one of ``ENGINES``.
        kernels: whether there are any for the operation.
        across: whether the host engine has a form of it for several domains.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    if engine == "plain":
        return "plain", "the plain engine was asked for"
    obstacle = _obstacle(comm, device, dtype, engine, kernels, across)
    if obstacle is None and engine != "auto":
        return engine, f"the {engine} engine was asked for"
    if obstacle is None and device.type == "cuda":
        return "triton", "GPU tensors of ranks that reach each other's memory"
    if obstacle is None and comm.inside is not None:
        return "host", "CPU tensors; overlapped inside each domain, torch.distributed between them"
    if obstacle is None:
        return "host", "CPU tensors of ranks that share memory"
    if engine != "auto":
        raise ValueError(f'engine="{engine}" cannot serve this call: {obstacle}')
    warnings.warn(f"fusedcomm runs without overlap: {obstacle}", stacklevel=2)
    return "plain", obstacle


def _obstacle(
    comm: Communicator,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    kernels: bool,
    across: bool,
) -> str | None:
    """Why an overlapped engine cannot serve; ``auto`` means the device's own."""
    if comm.inside is not None and (engine == "triton" or device.type == "cuda"):
        return "its kernels serve one domain, and the group has several"
    if comm.inside is not None and not across:
        return "this operation overlaps within one domain only, and the group has several"
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
    return _dtype_obstacle(dtype) or comm.gpu(device).domain.obstacle


def _dtype_obstacle(dtype: torch.dtype) -> str | None:
    return "its kernels take float32, float16 and bfloat16" if dtype == torch.float64 else None
