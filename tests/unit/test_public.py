"""The public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fusedcomm as fc


def test_every_public_name_exists() -> None:
    assert [name for name in fc.__all__ if not hasattr(fc, name)] == []


def test_testing_is_imported_on_first_use_only() -> None:
    program = (
        "import sys, fusedcomm as fc; assert 'fusedcomm.testing' not in sys.modules; "
        "fc.testing.run_ranks; assert 'fusedcomm.testing' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_dtensors_are_imported_on_first_use_only() -> None:
    program = (
        "import sys, fusedcomm as fc; assert 'torch.distributed.tensor' not in sys.modules; "
        "fc.FusedColwiseParallel; assert 'torch.distributed.tensor' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fc.nothing  # noqa: B018
