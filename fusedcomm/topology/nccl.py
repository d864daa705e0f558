"""Topology from NCCL's own view of a machine: the file that ``NCCL_TOPO_DUMP_FILE`` makes it write.

    <system>
      <cpu numaid="0" host_hash="…">
        <pci busid="…" link_speed="32.0 GT/s PCIe" link_width="16">      bridges and switches
          <pci busid="…" …>
            <gpu dev="0" sm="90" rank="0">
              <nvlink target="0000:84:00.0" count="18" tclass="0x068000"/>  to an NVSwitch
              <nvlink target="0000:1b:00.0" count="4" tclass="0x030200"/>   to another GPU
          <nic><net name="mlx5_0" speed="400000"/>                       Mbit/s

What it does not hold is whether the driver lets two GPUs address each other. GPUs tied by NVLink,
directly or by switches, can. Below one CPU, with the PCIe tree known, they are taken to; across
the link between two CPUs nothing promises it, and where a virtual machine hides the tree nothing
does either. Multicast is not in it: torch tells (``python -m fusedcomm doctor``).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from fusedcomm.topology.links import NETWORK, PCIE, Link, network, nvlink, pcie
from fusedcomm.topology.model import Topology
from fusedcomm.topology.partition import domains_of

_SWITCH_CLASS, _GPU_CLASS = "0x0680", "0x03"
#: PCIe of a machine that does not say: generation 3, as NCCL assumes.
_UNKNOWN_RATE, _UNKNOWN_LANES = 8.0, 16


@dataclass
class _Gpu:
    number: int
    capability: int
    busid: str
    host: str
    cpu: int
    numa: int
    #: (bus id, GT/s per lane, lanes) of every step from the CPU down to the GPU.
    path: list[tuple[str, float, int]]
    known: bool
    switched: int = 0
    direct: dict[str, int] = field(default_factory=dict)


def read_dump(path: str | PathLike[str], *, multicast: bool = False) -> Topology:
    """``parse_dump`` of a file."""
    return parse_dump(Path(path).read_text(), multicast=multicast)


def parse_dump(text: str, *, multicast: bool = False) -> Topology:
    """The topology of the GPUs in a dump, numbered by NCCL's ranks, or devices where it has none.

    Args:
        multicast: whether the switches can write to all GPUs at once: a fact of its own.

    Raises:
        ValueError: it is no dump, or has no GPU.
    """
    try:
        system = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"this is no XML, so no topology dump of NCCL: {error}") from error
    if system.tag != "system":
        raise ValueError(f"NCCL's topology dump begins with <system>, this with <{system.tag}>")
    gpus, rates = _gpus(system)
    if not gpus:
        raise ValueError("the dump has no <gpu>: NCCL saw none, or the file is cut off")
    gpus.sort(key=lambda gpu: gpu.number)
    links: dict[tuple[int, int], Link] = {}
    for a, first in enumerate(gpus):
        for b in range(a + 1, len(gpus)):
            found = _link(first, gpus[b])
            if found is not None:
                links[a, b] = found
    domains = domains_of(len(gpus), lambda a, b: (min(a, b), max(a, b)) in links)
    number = {rank: i for i, ranks in enumerate(domains) for rank in ranks}
    hosts = {gpu.host for gpu in gpus}
    across = PCIE if len(hosts) == 1 else NETWORK
    return Topology(
        domains,
        links={(a, b): link for (a, b), link in links.items() if number[a] == number[b]},
        inside=PCIE,
        between=network(sum(rates) / len(gpus)) if rates else across,
        multicast=[
            multicast and all(gpus[rank].switched for rank in ranks) and len(ranks) > 1
            for ranks in domains
        ],
        source="NCCL's topology dump",
        notes=_notes(gpus),
    )


def _gpus(system: ElementTree.Element) -> tuple[list[_Gpu], list[float]]:
    """Every GPU, and the rate of every network port in Mbit/s."""
    gpus: list[_Gpu] = []
    rates: list[float] = []

    def walk(node: ElementTree.Element, path: list[tuple[str, float, int]], known: bool) -> None:
        for child in node:
            if child.tag == "pci":
                rate = re.match(r"[0-9.]+", child.get("link_speed", ""))
                lanes = _int(child, "link_width", 0)
                step = (
                    child.get("busid", ""),
                    float(rate[0]) if rate else _UNKNOWN_RATE,
                    lanes or _UNKNOWN_LANES,
                )
                walk(child, [*path, step], known and rate is not None and lanes > 0)
            elif child.tag == "gpu":
                gpus.append(_gpu(child, path, known))
            elif child.tag == "nic":
                walk(child, path, known)
            elif child.tag == "net":
                rates.append(float(_int(child, "speed", 0)))

    def _gpu(node: ElementTree.Element, path: list[tuple[str, float, int]], known: bool) -> _Gpu:
        gpu = _Gpu(
            number=_int(node, "rank", _int(node, "dev", len(gpus))),
            capability=_int(node, "sm", 0),
            busid=path[-1][0] if path else "",
            host=cpu.get("host_hash", ""),
            cpu=index,
            numa=_int(cpu, "numaid", -1),
            path=path,
            # A GPU right below the CPU of no NUMA node: the tree is what a hypervisor shows.
            known=known and not (len(path) == 1 and _int(cpu, "numaid", -1) < 0),
        )
        for link in node.findall("nvlink"):
            count, kind = _int(link, "count", 1), link.get("tclass", "")
            if kind.startswith(_SWITCH_CLASS):
                gpu.switched += count
            elif kind.startswith(_GPU_CLASS):
                target = link.get("target", "")
                gpu.direct[target] = gpu.direct.get(target, 0) + count
        return gpu

    for index, cpu in enumerate(system.findall("cpu")):  # noqa: B007  read in _gpu
        walk(cpu, [], True)
    return gpus, [rate for rate in rates if rate > 0]


def _link(a: _Gpu, b: _Gpu) -> Link | None:
    """The best way between two GPUs of which it is known that they can address each other."""
    if a.host != b.host:
        return None
    capability = min(a.capability, b.capability)
    if a.switched and b.switched:
        return nvlink(min(a.switched, b.switched), capability, switched=True)
    count = min(a.direct.get(b.busid, 0), b.direct.get(a.busid, 0))
    if count:
        return nvlink(count, capability, switched=False)
    if a.cpu != b.cpu or not (a.known and b.known):
        return None
    shared = 0
    while shared < min(len(a.path), len(b.path)) and a.path[shared] == b.path[shared]:
        shared += 1
    apart = a.path[shared:] + b.path[shared:]
    return min((pcie(rate, lanes) for _, rate, lanes in apart), key=lambda link: link.bandwidth)


def _notes(gpus: list[_Gpu]) -> list[str]:
    notes = []
    if any(not gpu.known for gpu in gpus):
        notes.append(
            "the PCIe tree is hidden, as in a virtual machine: only NVLink tells which GPUs can "
            "address each other"
        )
    if len({gpu.host for gpu in gpus}) > 1 and any(gpu.switched for gpu in gpus):
        notes.append("NVLink joins several machines; a domain ends at its machine all the same")
    return notes


def _int(node: ElementTree.Element, name: str, default: int) -> int:
    text = node.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text, 0)
    except ValueError as error:
        raise ValueError(f'<{node.tag} {name}="{text}">: not a number') from error
