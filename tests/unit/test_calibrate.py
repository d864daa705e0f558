"""Fitting links to measured times, and the command line around it."""

from __future__ import annotations

import random

import pytest

from fusedcomm.cli import calibrate
from fusedcomm.cli.calibrate import Sample, fit, predicted_seconds
from fusedcomm.cli.main import main
from fusedcomm.topology import Link, Topology
from fusedcomm.topology.cost import predict


def samples(link: Link, n: int, noise: float = 0.0) -> list[Sample]:
    """What a machine would measure whose links are just so."""
    generator = random.Random(1)
    topology = Topology([list(range(n))], inside=link)
    found = []
    for nbytes in calibrate.SIZES:
        part = (n - 1) / n * nbytes
        terms = {
            "one_shot": (1.0, (n - 1.0) * nbytes, (n - 1.0) * nbytes),
            "two_shot": (2.0, 2 * part, part),
        }
        for algorithm, counted in terms.items():
            seconds = predict("all_reduce", algorithm, nbytes, topology)
            seconds *= 1 + noise * generator.uniform(-1, 1)
            found.append(Sample(algorithm, nbytes, *counted, seconds))
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_constants_are_found_again(n: int) -> None:
    """So the terms are those of the costs that the choice is made with."""
    link = Link("x", 12e9, 25e-6, reduce_rate=5e9)
    found = fit("x", samples(link, n))
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert found.reduce_rate == pytest.approx(link.reduce_rate)
    near = fit("x", samples(link, n, noise=0.02))
    assert near.latency_s == pytest.approx(link.latency_s, rel=0.05)


def test_what_costs_nothing_is_left_out() -> None:
    free = fit("x", samples(Link("x", 12e9, 25e-6), 4))
    assert free.reduce_rate is None or free.reduce_rate > 1e15
    # Times that fall as bytes grow: a negative cost by bytes fits best, and makes no sense.
    odd = [Sample("a", 8 << i, 1.0, 8.0 * 2**i, 0.0, 1e-3 / (i + 1)) for i in range(6)]
    link = fit("x", odd)
    assert link.bandwidth == pytest.approx(1e12) and link.latency_s > 0
    assert predicted_seconds(odd[0], link) == pytest.approx(link.latency_s, rel=1e-3)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--calibrate", "tensor_parallel"]) == 2
    assert main(["bench"]) == 2
    assert main(["bench", "--calibrate", "--ranks", "1"]) == 2
    captured = capsys.readouterr()
    assert "leave one out" in captured.err and "name an OP" in captured.err
    assert "at least 2" in captured.out
