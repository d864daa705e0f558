"""What a measurement was made on: machine, versions, date. It goes into every report."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import fusedcomm


def describe() -> dict[str, Any]:
    """The machine and the software, as JSON values. Memory in GiB; a fact unknown here is None."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or None,
            "architecture": platform.machine(),
            "vector_extensions": _vector_extensions(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_gib": _memory_gib(),
            "load_average": os.getloadavg()[0],
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "numpy")},
            "fusedcomm": fusedcomm.__version__,
            "revision": _revision(),
        },
    }


def summary(description: dict[str, Any]) -> str:
    """The same in one line."""
    machine, versions = description["machine"], description["versions"]
    return (
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; torch {versions['torch']}, Python {versions['python']}; "
        f"{description['date']}"
    )


def _field(file: str, name: str) -> str | None:
    """The first value of ``name`` in a file of "name : value" lines."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _vector_extensions() -> list[str]:
    """What decides how fast a CPU multiplies matrices."""
    flags = (_field("/proc/cpuinfo", "flags") or _field("/proc/cpuinfo", "Features") or "").split()
    telling = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")
    return [flag for flag in telling if flag in flags]


def _memory_gib() -> float | None:
    total = _field("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of the source tree this file lies in, "+" if it was changed since."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # A file of an installation may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--short") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, no commit
        return None
