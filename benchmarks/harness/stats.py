"""Medians, spreads and ratios with their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile; their difference is the spread that is reported."""
    low, high = np.quantile(samples, [0.25, 0.75])
    return float(low), float(high)


def compare(*pairs: tuple[Sequence[float], Sequence[float]]) -> Estimate:
    """Geometric mean over ``pairs`` of median(a) / median(b); one pair gives its plain ratio.

    a[i] and b[i] must be measured in the same round. The interval is a percentile bootstrap that
    draws rounds: a and b of a round stay together, so that a disturbance which slowed both (the
    clock, a neighbour) does not count as a difference; pairs are drawn independently.
    """
    if not pairs:
        raise ValueError("compare needs at least one pair of samples")
    generator = np.random.default_rng(0)  # the same samples always give the same report
    logs, drawn_logs = [], []
    for a, b in pairs:
        if len(a) != len(b) or not a:
            raise ValueError(f"samples must come in pairs, got {len(a)} and {len(b)} of them")
        rounds = generator.integers(0, len(a), size=(RESAMPLES, len(a)))
        logs.append(np.log(np.median(a) / np.median(b)))
        drawn_a, drawn_b = np.asarray(a)[rounds], np.asarray(b)[rounds]
        drawn_logs.append(np.log(np.median(drawn_a, axis=1) / np.median(drawn_b, axis=1)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.mean(drawn_logs, axis=0), [tail, 1 - tail])
    return Estimate(float(np.exp(np.mean(logs))), float(np.exp(low)), float(np.exp(high)))
