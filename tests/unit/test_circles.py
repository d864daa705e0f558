"""Circles of waiting ranks: found when they are certain, and only then."""

from __future__ import annotations

import pytest

from fusedcomm.board import ControlBlock
from fusedcomm.circles import CALL, RECV, SEND, Circles, describe
from fusedcomm.symmetric.shm import Segment


class Ranks:
    """Ranks of one process, with a control block each."""

    def __init__(self, world_size: int) -> None:
        self.blocks = {
            rank: ControlBlock(Segment.create("control", ControlBlock.size(world_size)), world_size)
            for rank in range(world_size)
        }
        self.circles = [Circles(rank, self.blocks) for rank in range(world_size)]

    def look(self, rank: int, peer: int, kind: int = RECV, begun: float = 1.0):
        return self.circles[rank].look(begun, kind, peer)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_circle_is_found_by_all(world_size: int) -> None:
    ranks = Ranks(world_size)
    found = {}
    for _ in range(5):
        for rank in range(world_size):
            chain = ranks.look(rank, (rank + 1) % world_size)
            if chain:
                found.setdefault(rank, chain)
    assert sorted(found) == list(range(world_size))
    for rank, chain in found.items():
        assert [entry.rank for entry in chain] == [
            (rank + i) % world_size for i in range(len(chain))
        ]


def test_nothing_while_another_rank_does_not_look() -> None:
    """Its entry may be of a wait that is over."""
    ranks = Ranks(2)
    ranks.look(1, 0)
    for _ in range(20):
        assert ranks.look(0, 1) is None
    ranks.look(1, 0)
    assert ranks.look(0, 1) is None, "one beat may come from a look before this rank waited"
    ranks.look(1, 0)
    assert ranks.look(0, 1) is not None


def test_another_wait_of_the_same_kind_begins_anew() -> None:
    ranks = Ranks(2)
    for wait in range(20):
        assert ranks.look(0, 1) is None
        assert ranks.look(1, 0, begun=float(wait)) is None


def test_a_chain_that_ends_is_none() -> None:
    ranks = Ranks(3)
    for _ in range(9):
        assert ranks.look(0, 1) is None
        assert ranks.look(1, 2) is None


def test_a_circle_of_others_is_theirs_to_find() -> None:
    ranks = Ranks(3)
    for _ in range(9):
        ranks.look(1, 2)
        ranks.look(2, 1)
        assert ranks.look(0, 1) is None


def test_what_it_says() -> None:
    ranks = Ranks(2)
    for kinds, words in (
        ((SEND, SEND), ["more than the buffer of 2 MiB", "batch_send_recv"]),
        ((RECV, CALL), ["rank 0 in recv for rank 1", "rank 1 in a call of all ranks for rank 0"]),
        ((CALL, RECV), ["rank 0 is in [all_reduce]"]),
    ):
        chain = None
        for _ in range(9):
            begun = hash(kinds) + 1.0
            chain = ranks.look(0, 1, kinds[0], begun) or chain
            ranks.look(1, 0, kinds[1], begun)
        assert chain is not None
        text = describe(chain, 2 << 20, "all_reduce")
        assert all(word in text for word in words), text
