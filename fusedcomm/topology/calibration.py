"""The links of this machine as they were measured, kept in a file.

``python -m fusedcomm bench --calibrate`` writes it. It lies in ``$XDG_CACHE_HOME/fusedcomm`` (or
``~/.cache/fusedcomm``), one file a host, for home directories are shared. A group uses what rank 0
read, so that all ranks choose alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedcomm.topology.links import Link

_VERSION = 1


def host_key() -> str:
    """Names this host: its name, and a digest of its processor and number of cores."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    facts = f"{platform.machine()} {model} {os.cpu_count()}"
    digest = hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()
    return f"{platform.node() or 'host'}-{digest}"


def path() -> Path:
    """Where this host's file is, or would be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fusedcomm" / f"links-{host_key()}.json"


def save(links: Mapping[str, Link], facts: Mapping[str, Any]) -> Path:
    """Write the measured links, and what they were measured on; returns the file.

    Args:
        links: kind -> the link of that kind.
        facts: for people: date, versions, ranks.
    """
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": _VERSION,
        "links": {kind: link.as_json() for kind, link in links.items()},
        **facts,
    }
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)  # Readers see the old file or the new one, whole.
    load.cache_clear()
    return file


@functools.cache
def load() -> dict[str, Link]:
    """The measured links of this host, kind -> link; empty if there are none.

    Read once a process: within one, choices do not change.
    """
    file = path()
    try:
        content = json.loads(file.read_text())
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, not {_VERSION}")
        return {kind: Link(**link) for kind, link in content["links"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{file} cannot be used ({error}); write it anew with "
            "`python -m fusedcomm bench --calibrate`, or delete it",
            stacklevel=2,
        )
        return {}
