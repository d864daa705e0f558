"""How a call ended on each rank."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["returned", "raised", "died", "unfinished"]


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank.

    fate        "returned": ``value`` is what the function returned
                "raised": ``error`` is the exception, ``details`` its traceback
                "died": the process ended, with ``exit_code`` as ``subprocess`` counts them
                "unfinished": it was still at work at the limit; ``details`` are its stacks then
    at_ns       when, by ``time.monotonic_ns``, which all processes share
    """

    rank: int
    fate: Fate
    at_ns: int
    value: Any = None
    error: BaseException | None = None
    details: str = ""
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.fate == "returned"

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed the process, if one did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return signal.Signals(-self.exit_code)

    @property
    def summary(self) -> str:
        """One line."""
        if self.fate == "raised":
            return f"raised {type(self.error).__name__}: {self.error}"
        if self.signal is not None:
            return f"was killed by {self.signal.name}"
        if self.fate == "died":
            return f"ended its process with exit code {self.exit_code}"
        return "had not finished" if self.fate == "unfinished" else "returned"


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that are no success, in the order in which they explain each other."""
    # A death is always a cause, a hang mostly a consequence.
    order = {"died": 0, "raised": 1, "unfinished": 2}
    failed = [outcome for outcome in outcomes if not outcome.ok]
    return sorted(failed, key=lambda outcome: (order[outcome.fate], outcome.at_ns))


class RemoteError(RuntimeError):
    """Stands for an exception of a rank that cannot be pickled; names its type and message."""


class RankError(RuntimeError):
    """A call failed on at least one rank.

    outcomes    how it ended on every rank, by rank
    first       the failure that came first; its exception, if there is one, is ``__cause__``
    """

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = failures(self.outcomes)
        self.first = failed[0]
        lines = [f"{name} failed on {len(failed)} of {len(self.outcomes)} ranks"]
        for outcome in failed:
            later = (outcome.at_ns - self.first.at_ns) / 1e9
            when = "first" if outcome is self.first else f"{later:.2f} s later"
            lines.append(f"\n--- rank {outcome.rank}, {when}: {outcome.summary}")
            if outcome.details:
                lines.append(outcome.details.rstrip())
        super().__init__("\n".join(lines))
        self.__cause__ = self.first.error
