"""Ranks for a single call; see ``pool`` for what happens when one fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fusedcomm.ranks.pool import OnEvent, RankPool


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``fn(rank, *args)`` on ``world_size`` new ranks; returns the results by rank.

    See ``RankPool`` for ``env``, and ``RankPool.run`` for the rest. The limit does not include the
    start of the ranks.
    """
    with RankPool(world_size, env=env) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    on_event: OnEvent = lambda rank, event: None,
    pin: bool = False,
    threads: int = 1,
    timeout_s: float = math.inf,
) -> list[Any]:
    """As ``run_ranks``, for programs that show how far their ranks are.

    ::

        def work(rank, emit, size):
            emit("started")
            return torch.ones(size).sum()

        sums = launch(work, 3, 1000, on_event=lambda rank, event: print(rank, event))

    See ``RankPool`` for ``pin`` and ``threads``, and ``RankPool.run`` for the rest.
    """
    with RankPool(world_size, pin=pin, threads=threads) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, on_event=on_event)
