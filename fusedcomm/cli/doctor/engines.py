"""What will run how, as the planner says it."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from fusedcomm.cli.doctor.findings import Finding
from fusedcomm.planning.engine import ACROSS, choose_engine

_SECTION = "what runs how"


def examine() -> list[Finding]:
    """For ranks on CPU, on GPUs, and over several domains: the engine, and why."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    one: Any = SimpleNamespace(shares_memory=True, inside=None, device=cpu)
    several: Any = SimpleNamespace(shares_memory=False, inside=one, device=cpu)
    apart: Any = SimpleNamespace(shares_memory=False, inside=None, device=cpu)
    found = [
        _answer("CPU ranks of one machine", one, cpu),
        _answer("CPU ranks of equal domains", several, cpu),
        _answer("CPU ranks that share nothing", apart, cpu),
    ]
    if torch.cuda.is_available():
        able = {"device": gpu, "reach": lambda device: SimpleNamespace(obstacle=None)}
        on_gpu: Any = SimpleNamespace(shares_memory=True, inside=None, **able)
        in_domains: Any = SimpleNamespace(shares_memory=False, inside=on_gpu, **able)
        found.append(_answer("GPU ranks that reach each other", on_gpu, gpu))
        found.append(_answer("GPU ranks of equal domains", in_domains, gpu))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    found.append(
        Finding(
            _SECTION,
            'engine="triton" on CPU',
            "Triton's interpreter is on: its kernels run here, slowly, to be debugged"
            if interpreted
            else "off; TRITON_INTERPRET=1 before Python starts runs the kernels in Triton's "
            "interpreter, to be debugged",
            value=interpreted,
        )
    )
    return found


def _answer(who: str, comm: Any, device: torch.device) -> Finding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, reason = choose_engine(comm, device, torch.bfloat16, "auto", across=ACROSS)
    return Finding(_SECTION, who, f"engine {engine}: {reason}", value=engine)
