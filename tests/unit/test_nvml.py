"""Reading NVML, from a module that answers as the real package does."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from fusedcomm.topology import detect, nvml
from fusedcomm.topology.links import PCIE, PCIE_HOST

OK, CHIPSET, NOT_SUPPORTED = 0, 1, 5


class NVMLError(Exception):
    """The package's base of all errors."""


class FabricInfo(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    ]


class FakeNvml:
    """``pynvml`` for a machine that a test describes. Names, constants, types as in version 13.

    Args:
        switched: links of every GPU to switches.
        bridges: pair of GPUs -> direct links between them.
        refused: (from, to, capability) -> a P2P status other than OK.
        ancestors: pair of GPUs -> common ancestor; 10 (below one switch) unless given.
        lit: whether the links are up.
    """

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as the package has it
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_CHIPSET_NOT_SUPPORED = 1
    NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1
    NVML_P2P_STATUS_NOT_SUPPORTED = 5
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_TOPOLOGY_HOSTBRIDGE = 30
    c_nvmlGpuFabricInfoV_t = FabricInfo  # noqa: N815

    def __init__(
        self,
        count: int,
        *,
        capability: tuple[int, int] = (9, 0),
        switched: int = 0,
        bridges: dict[tuple[int, int], int] | None = None,
        refused: dict[tuple[int, int, int], int] | None = None,
        ancestors: dict[tuple[int, int], int] | None = None,
        lit: bool = True,
        clique: int | None = None,
    ) -> None:
        self.count, self.capability, self.switched = count, capability, switched
        self.bridges, self.refused = bridges or {}, refused or {}
        self.ancestors, self.lit, self.clique = ancestors or {}, lit, clique
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return SimpleNamespace(index=index)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        return f"GPU-{handle.index}"

    def nvmlDeviceGetName(self, handle: Any) -> bytes:  # noqa: N802
        return b"NVIDIA H100"  # older packages return bytes

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:  # noqa: N802
        return self.capability

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:  # noqa: N802
        bus = 0x10 + handle.index
        return SimpleNamespace(domain=0, bus=bus, device=0, busId=f"00000000:{bus:02X}:00.0")

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: Any) -> int:  # noqa: N802
        assert isinstance(index, int), "ctypes would refuse"
        return self.refused.get((a.index, b.index, index), OK)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any) -> int:  # noqa: N802
        return self.ancestors.get((min(a.index, b.index), max(a.index, b.index)), 10)

    def _end(self, handle: Any, link: int) -> int | None:
        """Where a link ends: a GPU's number, or None for a switch."""
        if link < self.switched:
            return None
        link -= self.switched
        for (a, b), links in self.bridges.items():
            if handle.index in (a, b):
                if link < links:
                    return a + b - handle.index
                link -= links
        raise NVMLError("Invalid Argument")

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:  # noqa: N802
        self._end(handle, link)
        return int(self.lit)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:  # noqa: N802
        return 2 if self._end(handle, link) is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:  # noqa: N802
        bus = 0x10 + (self._end(handle, link) or 0)
        return SimpleNamespace(domain=0, bus=bus, device=0, busId=f"0000:{bus:02x}:00.0")

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> int:  # noqa: N802
        if self.clique is None:
            raise NVMLError("Not Supported")
        structure = info._obj  # a pointer made by byref, as ctypes needs it
        structure.clusterUuid[0], structure.cliqueId, structure.state = 7, self.clique, 3
        return 0


def kinds(gpus: list[nvml.Gpu]) -> dict[tuple[int, int], str]:
    return {
        (a, int(uuid.removeprefix("GPU-"))): link.kind
        for a, gpu in enumerate(gpus)
        for uuid, link in gpu.links.items()
    }


def test_a_switch_connects_all() -> None:
    module = FakeNvml(4, switched=18, clique=3)
    gpus, driver = nvml.read(module)
    assert driver == "570.1" and module.open == 0
    assert set(kinds(gpus).values()) == {"nvswitch"} and len(kinds(gpus)) == 12
    assert gpus[0].links["GPU-1"].bandwidth == pytest.approx(371e9, rel=1e-3)
    assert gpus[0].name == "NVIDIA H100" and gpus[0].capability == 90
    assert gpus[0].clique.endswith(".3") and gpus[0].clique == gpus[3].clique


def test_bridges_connect_pairs_and_pcie_the_rest() -> None:
    module = FakeNvml(
        4, capability=(8, 0), bridges={(0, 1): 12, (2, 3): 12},
        ancestors={(0, 2): 50, (0, 3): 50, (1, 2): 50, (1, 3): 30},
    )  # fmt: skip
    gpus, _ = nvml.read(module)
    found = kinds(gpus)
    assert found[0, 1] == found[3, 2] == "nvlink"
    assert gpus[0].links["GPU-1"].bandwidth == pytest.approx(240e9)
    assert gpus[1].links["GPU-3"] == PCIE and gpus[0].links["GPU-2"] == PCIE_HOST
    assert gpus[0].clique == ""


def test_lit_links_are_no_connection_and_dark_ones_none_either() -> None:
    refused = {(0, 1, 0): CHIPSET, (1, 0, 1): NOT_SUPPORTED}
    gpus, _ = nvml.read(FakeNvml(2, switched=18, refused=refused))
    assert kinds(gpus) == {}
    assert gpus[0].refused == {"GPU-1": "cannot read: chipset_not_supported"}
    assert gpus[1].refused == {"GPU-0": "cannot write: not_supported"}
    gpus, _ = nvml.read(FakeNvml(2, switched=18, lit=False))
    assert set(kinds(gpus).values()) == {"pcie"}


def test_nvml_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NVMLError("NVML Shared Library Not Found")

    with pytest.raises(nvml.NvmlMissingError, match="driver does not answer.*Shared Library"):
        nvml.read(Dead(1))

    class Sick(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise NVMLError("GPU is lost")

    sick = Sick(1)
    with pytest.raises(nvml.NvmlMissingError, match="GPU is lost"):
        nvml.read(sick)
    assert sick.open == 0

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(nvml.importlib, "import_module", missing)
    with pytest.raises(nvml.NvmlMissingError, match="pip install nvidia-ml-py"):
        nvml.read()


def test_a_ranks_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's number 0 is NVML's number 2 here."""
    import torch

    module = FakeNvml(3, switched=18, refused={(2, 0, 0): CHIPSET})
    read = nvml.read
    monkeypatch.setattr(nvml, "read", lambda: read(module))
    properties = SimpleNamespace(uuid="2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = detect.facts_of("machine", torch.device("cuda", 0))
    assert facts.gpu == "GPU-2" and list(facts.links) == ["GPU-1"] and not facts.note
    properties.uuid = "other"
    assert "does not list GPU-other" in detect.facts_of("machine", torch.device("cuda", 0)).note
