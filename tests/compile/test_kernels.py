"""Every kernel, compiled for every chip, obeys the rules of docs/kernels.md."""

from __future__ import annotations

import pytest

from benchmarks._compiled.cases import CASES
from benchmarks._compiled.loading import ROOT, kernels
from benchmarks._compiled.report import DEVIATIONS, selected

#: Files of kernels/ that are not compiled here, and why.
LEFT_OUT = {
    "peer_write": "one store, of the doctor's; no operation",
}


@pytest.mark.parametrize("case, chip", [(case.name, chip) for case, chip in selected()])
def test_rules(rows, case, chip):
    assert rows[case, chip].broken == {}


def test_every_kernel_has_a_case():
    compiled = {(case.file, case.kernel) for case in CASES}
    for file in (ROOT / "kernels").glob("*.py"):
        if file.stem in {"__init__", *LEFT_OUT}:
            continue
        module = kernels(file.stem)
        # Kernels are launched, and say so in their name; other functions are part of them.
        names = [name for name in vars(module) if name.endswith("_kernel")]
        own = [name for name in names if getattr(module, name).__module__ == module.__name__]
        missing = [name for name in own if (file.stem, name) not in compiled]
        assert not missing, f"no case in benchmarks/_compiled/cases.py for {file.stem}: {missing}"


def test_names_of_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_deviations_are_still_there(rows):
    """One that is gone must be struck off, so that it cannot come back unseen."""
    found = {(name, row.chip) for row in rows.all() for name in row.deviations}
    assert found == set(DEVIATIONS)
