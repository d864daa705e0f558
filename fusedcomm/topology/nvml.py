"""What NVML knows of the GPUs of this machine; needs the optional package ``nvidia-ml-py``.

Connectivity is ``nvmlDeviceGetP2PStatus`` in both directions and for reading and writing: a link's
own state only says that it is lit. The kind of a link follows from the remote ends of the NVLinks,
or from the common ancestor on PCIe. GPUs are named by UUID: CUDA numbers them in another order
than NVML, and ``CUDA_VISIBLE_DEVICES`` changes CUDA's only.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from typing import Any

from fusedcomm.topology.links import PCIE, PCIE_HOST, Link, nvlink

#: nvmlGpuP2PCapsIndex_t of nvml.h. (The Python package's constant for reading is a tuple.)
_READ, _WRITE = 0, 1
_FABRIC_COMPLETED = 3


@dataclass
class Gpu:
    """One GPU.

    Attributes:
        uuid: NVML's, which begins with "GPU-".
        capability: compute capability, 90 for 9.0.
        links: uuid of every GPU that it can read and write -> over which link.
        refused: uuid of every other GPU -> why not, in NVML's words.
        clique: its place in an NVLink fabric of several machines; "" if in none.
    """

    uuid: str
    name: str
    capability: int
    bus: str
    links: dict[str, Link] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    clique: str = ""


class NvmlMissingError(RuntimeError):
    """NVML cannot be asked; the text says why and what would help."""


def read(module: Any = None) -> tuple[list[Gpu], str]:
    """Every GPU of the machine in NVML's order, and the driver's version.

    Args:
        module: stands in for ``pynvml``, in tests.

    Raises:
        NvmlMissingError: the package or the driver is not there, or refuses.
    """
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlMissingError(
                "the Python package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            ) from error
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise NvmlMissingError(f"NVIDIA's driver does not answer ({error})") from error
    try:
        driver = _text(module.nvmlSystemGetDriverVersion())
        handles = [
            module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())
        ]
        return _Reader(module, handles).gpus(), driver
    except module.NVMLError as error:
        raise NvmlMissingError(f"NVML gave an error ({error})") from error
    finally:
        module.nvmlShutdown()


class _Reader:
    def __init__(self, module: Any, handles: list[Any]) -> None:
        self._nvml = module
        self._handles = handles

    def gpus(self) -> list[Gpu]:
        gpus = [self._gpu(handle) for handle in self._handles]
        ends = [self._nvlinks(handle) for handle in self._handles]
        for a, gpu in enumerate(gpus):
            for b, other in enumerate(gpus):
                if a == b:
                    continue
                obstacle = self._obstacle(a, b)
                if obstacle is None:
                    gpu.links[other.uuid] = self._link(gpus, ends, a, b)
                else:
                    gpu.refused[other.uuid] = obstacle
        return gpus

    def _gpu(self, handle: Any) -> Gpu:
        nvml = self._nvml
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            capability=10 * major + minor,
            bus=_bus(nvml.nvmlDeviceGetPciInfo(handle)),
            clique=self._clique(handle),
        )

    def _obstacle(self, a: int, b: int) -> str | None:
        """Why GPU ``a`` cannot read and write ``b``'s memory; None if it can."""
        nvml = self._nvml
        for index, verb in ((_READ, "read"), (_WRITE, "write")):
            status = nvml.nvmlDeviceGetP2PStatus(self._handles[a], self._handles[b], index)
            if status != nvml.NVML_P2P_STATUS_OK:
                return f"cannot {verb}: {_status_name(nvml, status)}"
        return None

    def _nvlinks(self, handle: Any) -> tuple[int, dict[str, int]]:
        """How many lit NVLinks lead to switches, and to which GPU (by bus id) how many."""
        nvml = self._nvml
        switched = 0
        direct: dict[str, int] = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    switched += 1
                elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                    remote = _bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
                    direct[remote] = direct.get(remote, 0) + 1
            except nvml.NVMLError:
                continue  # This GPU has no such link, or its end is hidden.
        return switched, direct

    def _link(
        self, gpus: list[Gpu], ends: list[tuple[int, dict[str, int]]], a: int, b: int
    ) -> Link:
        nvml = self._nvml
        capability = min(gpus[a].capability, gpus[b].capability)
        switched = min(ends[a][0], ends[b][0])
        if switched:
            return nvlink(switched, capability, switched=True)
        direct = ends[a][1].get(gpus[b].bus, 0)
        if direct:
            return nvlink(direct, capability, switched=False)
        ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(self._handles[a], self._handles[b])
        return PCIE if ancestor <= nvml.NVML_TOPOLOGY_HOSTBRIDGE else PCIE_HOST

    def _clique(self, handle: Any) -> str:
        nvml = self._nvml
        try:
            info = nvml.c_nvmlGpuFabricInfoV_t()
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except (AttributeError, nvml.NVMLError):
            return ""  # An older driver or package, or no such fabric.
        if info.state != _FABRIC_COMPLETED or not any(info.clusterUuid):
            return ""
        return f"{bytes(info.clusterUuid).hex()}.{info.cliqueId}"


def _status_name(nvml: Any, status: int) -> str:
    prefix = "NVML_P2P_STATUS_"
    names = [name for name in dir(nvml) if name.startswith(prefix)]
    # The header has one name misspelt, and the right one beside it: the longer.
    found = [name for name in names if getattr(nvml, name) == status]
    return max(found, key=len).removeprefix(prefix).lower() if found else f"status {status}"


def _bus(info: Any) -> str:
    """The PCI address. The text in ``busId`` comes in two widths, the numbers in one."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
