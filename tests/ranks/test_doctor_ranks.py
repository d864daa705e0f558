"""``doctor`` starts two ranks and sees whether they work."""

from __future__ import annotations

import pytest

from fusedcomm.cli.doctor import ranks


def test_two_ranks_work_here() -> None:
    found = {finding.name: finding for finding in ranks.examine()}
    assert not any(finding.broken for finding in found.values()), found
    assert "results are right" in found["two ranks"].text
    assert "engine host" in found["an all-gather and product"].text
    assert "shared-memory" in found["topology"].text


def test_ranks_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_DOMAINS", "0,1;1")  # the ranks inherit it
    (finding,) = ranks.examine()
    assert finding.broken and "rank 1 stands in" not in finding.name
    assert "every rank of the default group once" in finding.text + finding.advice
