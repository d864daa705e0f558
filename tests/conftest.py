"""Rank pools for every test: started at the first use, kept, renewed after a fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedcomm.testing import RankPool

#: Pools alive at once: nearly all that the suite asks for, so that few are started twice. Each is
#: an interpreter with torch, and ranks that share its pages.
LIMIT = 10


class Pools:
    """Hands out a pool for a world size and an environment, the one of the last time if it lives.

    A pool that a test broke is restarted here; one that a test closed is started anew.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], RankPool] = {}  # least recently used first

    def __call__(self, world_size: int, **env: str) -> RankPool:
        key = (world_size, *sorted(env.items()))
        pool = self._pools.pop(key, None)
        if pool is None or pool.closed:
            while len(self._pools) >= LIMIT:
                self._pools.pop(next(iter(self._pools))).close()
            pool = RankPool(world_size, env=env, preload=["pytest"])
        elif pool.broken is not None:
            pool.restart()
        self._pools[key] = pool
        return pool

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(world_size, **env)`` is a ``RankPool`` ready for use; tests need not close it."""
    pools = Pools()
    yield pools
    pools.close()
