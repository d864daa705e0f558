"""The GPUs, what connects them, and whether they really write each other's memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from fusedcomm.cli.doctor.findings import Finding
from fusedcomm.topology import nvml

_SECTION = "GPUs"
_WORDS = 64


def examine() -> list[Finding]:
    """All findings about GPUs; plain words where there are none."""
    found = []
    try:
        gpus, driver = nvml.read()
    except nvml.NvmlMissingError as error:
        gpus = []
        found.append(_nvml_missing(error))
    else:
        found.append(Finding(_SECTION, "NVIDIA driver", driver, value=driver))
    if not torch.cuda.is_available():
        return [*found, _no_gpu(bool(gpus))]
    ordinals = {
        f"GPU-{torch.cuda.get_device_properties(device).uuid}": device
        for device in range(torch.cuda.device_count())
    }
    found += [_device(uuid, device, gpus) for uuid, device in ordinals.items()]
    found += _links(gpus, ordinals)
    found += check_writes(len(ordinals))
    found.append(_multicast(len(ordinals)))
    return found


def _nvml_missing(error: nvml.NvmlMissingError) -> Finding:
    helps = torch.cuda.is_available()
    return Finding(
        _SECTION,
        "NVML",
        f"not there: {error}",
        advice="pip install nvidia-ml-py: without it, GPUs of one machine are taken to reach each "
        "other"
        if helps
        else "",
    )


def _no_gpu(driver_sees_some: bool) -> Finding:
    if driver_sees_some:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = (
            f"CUDA_VISIBLE_DEVICES={hidden} hides them"
            if hidden is not None
            else "this torch is built without CUDA"
            if not torch.version.cuda
            else "CUDA does not start; see what torch.cuda.init() says"
        )
        return Finding(
            _SECTION, "devices", f"the driver has GPUs, but torch sees none: {why}", advice=why,
            value=[],
        )  # fmt: skip
    return Finding(
        _SECTION,
        "devices",
        "this machine has no GPU that torch can use. That is fine: ranks are processes on the CPU",
        value=[],
    )


def _device(uuid: str, device: int, gpus: list[nvml.Gpu]) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    number = next((i for i, gpu in enumerate(gpus) if gpu.uuid == uuid), None)
    where = "" if number is None else f", number {number} of the driver"
    old = properties.major < 8
    return Finding(
        _SECTION,
        f"cuda:{device}",
        f"{properties.name}, compute capability {properties.major}.{properties.minor}{where}",
        advice="the kernels need compute capability 8.0" if old else "",
        value={"uuid": uuid, "capability": [properties.major, properties.minor]},
    )


def _links(gpus: list[nvml.Gpu], ordinals: dict[str, int]) -> list[Finding]:
    """One finding for every pair of devices of which NVML knows."""
    found = []
    for gpu in gpus:
        a = ordinals.get(gpu.uuid)
        for other in gpus:
            b = ordinals.get(other.uuid)
            if a is None or b is None or a >= b:
                continue
            link = gpu.links.get(other.uuid)
            refused = gpu.refused.get(other.uuid) or other.refused.get(gpu.uuid)
            found.append(
                Finding(
                    _SECTION,
                    f"cuda:{a} to cuda:{b}",
                    refused or str(link),
                    advice="these two cannot address each other and are in different domains; an "
                    "IOMMU or ACS in the PCIe switches is the usual reason (virtual machines have "
                    "both)"
                    if refused
                    else "",
                    value=None if refused or link is None else link.as_json(),
                )
            )
    return found


def check_writes(
    count: int,
    capable: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
    write: Callable[[int, int], str] | None = None,
) -> list[Finding]:
    """Have every device write into every other's memory, and look.

    Args:
        count: how many devices there are.
        capable, write: what is asked, and done, for a pair; for tests.
    """
    write = write or _write
    refused, failed, right = [], [], 0
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            if not capable(a, b):
                refused.append(f"{a} to {b}")
                continue
            problem = write(a, b)
            if problem:
                failed.append(f"{a} to {b}: {problem}")
            else:
                right += 1
    if count < 2:
        return []
    found = [
        Finding(
            _SECTION,
            "peer writes",
            f"{right} of {count * (count - 1)} ordered pairs write each other's memory"
            + (f"; CUDA refuses {', '.join(refused)}" if refused else ""),
            value={"right": right, "refused": refused, "failed": failed},
        )
    ]
    if failed:
        found.append(
            Finding(
                _SECTION,
                "peer writes",
                f"CUDA promises these and they do not arrive: {'; '.join(failed)}",
                advice="do not overlap between these GPUs: declare their domains apart "
                "(FUSEDCOMM_DOMAINS), and look for an IOMMU that is on, or ACS in PCIe switches",
                broken=True,
            )
        )
    return found


def _write(a: int, b: int) -> str:
    """Device ``a`` writes into ``b``'s memory; what went wrong, or ""."""
    target = torch.zeros(_WORDS, dtype=torch.int32, device=f"cuda:{b}")
    # A copy between the two makes torch open peer access, where it can be opened.
    torch.ones(1, device=f"cuda:{a}").to(f"cuda:{b}")
    torch.cuda.synchronize(b)
    try:
        with torch.cuda.device(a):
            write_pattern(target, 1000 * a + b)
            torch.cuda.synchronize(a)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if pattern_arrived(target, 1000 * a + b) else "the words did not arrive"


def write_pattern(target: torch.Tensor, first: int) -> None:
    """Launch the kernel that fills ``target``, ``[64]`` int32 wherever it lies, with a pattern."""
    from fusedcomm.kernels.peer_write import write_pattern_kernel  # needs triton; the rest does not

    write_pattern_kernel[(1,)](target.data_ptr(), first, COUNT=_WORDS)


def pattern_arrived(target: torch.Tensor, first: int) -> bool:
    """Whether ``write_pattern`` did its work."""
    wanted = torch.arange(first, first + _WORDS, dtype=torch.int32)
    return torch.equal(target.cpu(), wanted)


def _multicast(count: int) -> Finding:
    from torch._C import _distributed_c10d as c10d

    memory: Any = getattr(c10d, "_SymmetricMemory", None)
    device_type = torch._C._autograd.DeviceType.CUDA
    able = [
        device
        for device in range(count)
        if memory is not None and memory.has_multicast_support(device_type, device)
    ]
    text = f"on {len(able)} of {count} GPUs" if able else "no"
    return Finding(_SECTION, "multicast", text, value=able)
