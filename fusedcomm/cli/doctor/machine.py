"""The software, the processors and the limits that ranks run under."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.cli.doctor.findings import Finding
from fusedcomm.errors import SharedMemoryError
from fusedcomm.symmetric.fence import make_fence
from fusedcomm.symmetric.shm import Segment
from fusedcomm.topology import calibration
from fusedcomm.topology.declared import VARIABLE
from fusedcomm.topology.model import parse_domains

_SOFTWARE, _MACHINE = "software", "machine"
#: Descriptors that a rank should be able to hold: sockets and pidfds of 100 peers, and mappings.
_DESCRIPTORS = 1024
#: Whom Linux gives huge pages; the variable that makes torch ask for them.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASKING = "THP_MEM_ALLOC_ENABLE"


def examine() -> list[Finding]:
    """All findings about software, machine and settings."""
    return [*_software(), *_machine(), *_settings()]


def _software() -> list[Finding]:
    found = [
        Finding(_SOFTWARE, "fusedcomm", fusedcomm.__version__, value=fusedcomm.__version__),
        Finding(_SOFTWARE, "Python", platform.python_version(), value=platform.python_version()),
    ]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    found.append(Finding(_SOFTWARE, "torch", f"{torch.__version__}, {build}", value=_v("torch")))
    triton = _v("triton")
    found.append(
        Finding(
            _SOFTWARE,
            "triton",
            triton or "not installed",
            advice=""
            if triton
            else "pip install triton: its kernels, also in the interpreter, need it",
            value=triton,
        )
    )
    gloo = dist.is_available() and dist.is_gloo_available()
    found.append(
        Finding(
            _SOFTWARE,
            "gloo",
            "in this torch" if gloo else "not in this torch",
            advice="" if gloo else "take a torch build with gloo: CPU ranks are a gloo group",
            broken=not gloo,
            value=gloo,
        )
    )
    return found


def _machine() -> list[Finding]:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    right = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count()
    found = [
        Finding(
            _MACHINE,
            "system",
            system,
            advice="" if right else "Linux on x86-64 or aarch64 is what this library runs on",
            broken=not right,
            value=system,
        ),
        Finding(
            _MACHINE,
            "cores",
            f"{usable} usable of {present}",
            advice=""
            if usable > 1
            else "ranks on one core take turns: results are right, times say nothing of overlap",
            value=usable,
        ),
        _shared_memory(),
        _pages(),
        _fences(),
        _descriptors(),
        _interface(),
    ]
    return found


def _shared_memory() -> Finding:
    try:
        segment = Segment.create("doctor", 1 << 20)
        segment.words[0] = 1
        segment.release_descriptor()
    except SharedMemoryError as error:
        return Finding(
            _MACHINE,
            "shared memory",
            str(error),
            advice="ranks share memory by memfd: raise the memory limit of the container or "
            "cgroup (the size of /dev/shm does not matter)",
            broken=True,
        )
    free = _available_memory()
    return Finding(_MACHINE, "shared memory", f"memfd works; {free / 1e9:.1f} GB free", value=free)


def _pages() -> Finding:
    """torch frees large tensors to the system, and new ones are zeroed page by page."""
    try:
        given = re.findall(r"\[(\w+)\]", _HUGE_PAGES.read_text())[0]
    except (OSError, IndexError):
        given = "never"
    asked = os.environ.get(_ASKING) == "1"
    used = given == "always" or (given == "madvise" and asked)
    return Finding(
        _MACHINE,
        "large CPU tensors",
        "in huge pages" if used else "in small pages",
        advice=f"{_ASKING}=1 before Python starts: a large tensor's first use takes a third of the "
        "time"
        if given == "madvise" and not asked
        else "",
        value=used,
    )


def _fences() -> Finding:
    try:
        make_fence()
    except Exception as error:
        return Finding(
            _MACHINE, "memory fences", str(error), broken=True,
            advice="flags cannot be ordered on this processor: use engine=\"plain\"",
        )  # fmt: skip
    tested = platform.machine() == "x86_64"
    return Finding(_MACHINE, "memory fences", "tested" if tested else "there, but never tested")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS
    return Finding(
        _MACHINE,
        "file descriptors",
        f"{soft} a process (hard limit {hard})",
        advice="" if enough else f"ulimit -n {_DESCRIPTORS}: a rank holds two for every peer",
        value=soft,
    )


def _interface() -> Finding:
    """gloo connects to the address that the host's name stands for, unless it is told better."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        known = {name for _, name in socket.if_nameindex()}
        missing = [name for name in chosen.split(",") if name not in known]
        return Finding(
            _MACHINE,
            "gloo's network",
            f"GLOO_SOCKET_IFNAME={chosen}",
            advice=f"there is no interface {', '.join(missing)}; there are "
            f"{', '.join(sorted(known))}"
            if missing
            else "",
            broken=bool(missing),
            value=chosen,
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding(
            _MACHINE,
            "gloo's network",
            f"the host's name, {name}, has no address",
            advice="export GLOO_SOCKET_IFNAME=lo for ranks on this machine alone, or put the name "
            "into /etc/hosts",
        )
    return Finding(_MACHINE, "gloo's network", f"{name} is {address}", value=address)


def _settings() -> list[Finding]:
    section, found = "settings", []
    text = os.environ.get(VARIABLE)
    if text:
        try:
            domains = parse_domains(text)
            found.append(Finding(section, VARIABLE, f"{len(domains)} domains", value=domains))
        except ValueError as error:
            found.append(
                Finding(section, VARIABLE, text, advice=str(error), broken=True, value=text)
            )
    measured = calibration.load()
    links = "; ".join(str(link) for link in measured.values())
    found.append(
        Finding(
            section,
            "measured links",
            f"{links} ({calibration.path()})" if measured else "none: those of a table are used",
            advice=""
            if measured
            else "python -m fusedcomm bench --calibrate measures this machine's, in a minute",
            value={kind: link.as_json() for kind, link in measured.items()},
        )
    )
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    found.append(
        Finding(
            section,
            "C compiler",
            compiler or "none",
            advice=""
            if compiler or not torch.version.cuda
            else "Triton builds its launchers with one: apt install gcc",
            value=compiler,
        )
    )
    return found


def _available_memory() -> int:
    """Bytes that the machine could give to programs."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def _v(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
