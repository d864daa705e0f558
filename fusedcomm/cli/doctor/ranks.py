"""Two ranks, started and put to work: the one test that what ranks need is really there."""

from __future__ import annotations

import time
from typing import Any

import torch

import fusedcomm as fc
from fusedcomm.cli.doctor.findings import Finding
from fusedcomm.ranks import RankError, launch

_SECTION = "ranks"
_LIMIT_S = 120.0


def examine() -> list[Finding]:
    """Start two ranks and let them multiply."""
    start = time.monotonic()
    try:
        said = launch(work, 2, timeout_s=_LIMIT_S)[0]
    except (RuntimeError, OSError) as error:
        why = error.first.summary if isinstance(error, RankError) else str(error)
        return [
            Finding(
                _SECTION,
                "two ranks",
                f"failed: {why}",
                advice="\n".join(str(error).strip().splitlines()[-12:]),
                broken=True,
            )
        ]
    seconds = time.monotonic() - start
    right = said["error"] < 1e-4
    found = [
        Finding(
            _SECTION,
            "two ranks",
            f"started, met and multiplied in {seconds:.1f} s; results are "
            + ("right" if right else f"WRONG by {said['error']:.2g}"),
            broken=not right,
            value=said["error"],
        ),
        Finding(_SECTION, "an all-gather and product", said["plan"]),
    ]
    found += [Finding(_SECTION, "topology", line) for line in said["topology"]]
    return found


def work(rank: int, emit: Any) -> dict[str, Any]:
    """One operation, compared with the product that a single process would have made."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32), torch.randn(16, 32)
    own = x.chunk(2)[rank]
    comm = fc.Communicator.of(timeout_s=_LIMIT_S / 2)
    with fc.trace() as recorded:
        y = fc.all_gather_linear(own, weight)
    (plan,) = recorded.plans
    error = (y - x @ weight.t()).norm() / y.norm()
    return {
        "error": float(error),
        "plan": f"engine {plan.engine}: {plan.reason}",
        "topology": comm.topology.describe(),
    }
