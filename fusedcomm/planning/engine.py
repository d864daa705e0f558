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
    comm: Communicator, device: torch.device, dtype: torch.dtype, engine: str
) -> tuple[str, str]:
    """The engine for one call, and a sentence of reason; warns where overlap is lost.

    Args:
        device, dtype: of the tensors.
        engine: what the caller asked for, one of ``ENGINES``.

    Raises:
        ValueError: the engine that was asked for cannot serve this group or device.
    """
    if engine == "plain":
        return "plain", "the plain engine was asked for"
    obstacle = _obstacle(comm, device, dtype, engine)
    if obstacle is None and engine != "auto":
        return engine, f"the {engine} engine was asked for"
    if obstacle is None:
        return "host", "CPU tensors of ranks that share memory"
    if engine != "auto":
        raise ValueError(f'engine="{engine}" cannot serve this call: {obstacle}')
    warnings.warn(f"fusedcomm runs without overlap: {obstacle}", stacklevel=2)
    return "plain", obstacle


def _obstacle(
    comm: Communicator, device: torch.device, dtype: torch.dtype, engine: str
) -> str | None:
    """Why an overlapped engine cannot serve; ``auto`` means the host engine."""
    if not comm.shares_memory:
        return "the group's ranks do not share memory (several machines)"
    if device.type != "cpu":
        return f"the overlapped engines serve CPU tensors so far, not {device.type}"
    if engine == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return (
                "CPU tensors run its kernels in Triton's interpreter: set TRITON_INTERPRET=1 "
                "before Python starts"
            )
        if dtype == torch.float64:
            return "its kernels take float32, float16 and bfloat16"
    return None
