"""Benchmarks, one module per operation: ``python -m fusedcomm bench OP``.

The folder is also the package ``fusedcomm.benchmarks``. A module here whose name does not start
with an underscore is an OP. It needs a docstring (its first line is shown in the list of ops) and
two functions, which harness/case.py describes:

    cases(options) -> list[Case]                # what is measured; run in every process
    summarise(results, options) -> list[Verdict]  # the last lines of the report

It may have a dtype of its own to be measured with by default, ``DEFAULT_DTYPE``, and a picture of
its own, ``draw(results, title, path)``.
"""

from __future__ import annotations

import pkgutil


def known() -> list[str]:
    """The names of the ops that have a benchmark; imports none of them."""
    found = pkgutil.iter_modules(__path__)
    return sorted(m.name for m in found if not m.ispkg and not m.name.startswith("_"))
