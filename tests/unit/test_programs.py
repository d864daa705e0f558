"""The all-reduce programs: right for any number of ranks, and as costly as the table says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.programs import ALGORITHMS, Receive, Send, all_reduce_programs, record
from fusedcomm.programs.all_reduce import Domains
from fusedcomm.programs.steps import link, messages_per_pair
from fusedcomm.schedule import shard_bounds

RANKS = (2, 3, 4, 6, 8)
#: Divisible by all of RANKS twice over (halves of halves, chunks of chunks), and not.
EVEN, UNEVEN = 48, 29


def lengths(size: int, parts: int) -> list[int]:
    return [stop - start for start, stop in shard_bounds(size, parts)]


def counted(algorithm: str, n: int, size: int, domains: Domains | None = None):
    return record(all_reduce_programs(algorithm, size, n, domains), size)


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    n=st.integers(1, 9),
    size=st.integers(0, 40),
    cuts=st.sets(st.integers(1, 8)),
)
def test_every_rank_gets_every_contribution_once(algorithm, n, size, cuts) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < n), n]
    domains = tuple(tuple(range(a, b)) for a, b in zip(edges, edges[1:], strict=False))
    found = counted(algorithm, n, size, domains)
    assert found.result == [[Counter(range(n))] * size] * n


@pytest.mark.parametrize("size", [EVEN, UNEVEN, 1, 0])
@pytest.mark.parametrize("n", RANKS)
class TestCounts:
    """Exactly the table of ``programs.all_reduce``, uneven chunks included."""

    @pytest.mark.parametrize("algorithm", ["pairwise", "one_shot"])
    def test_everyone_sends_everything(self, algorithm: str, n: int, size: int) -> None:
        found = counted(algorithm, n, size)
        assert found.steps == 1
        assert found.messages == [n - 1] * n
        assert found.sent == [(n - 1) * size] * n

    def test_parameter_server(self, n: int, size: int) -> None:
        found = counted("parameter_server", n, size)
        assert found.steps == 2
        assert found.messages == [n - 1, *[1] * (n - 1)]
        assert found.sent == [(n - 1) * size, *[size] * (n - 1)]

    def test_ring(self, n: int, size: int) -> None:
        found = counted("ring", n, size)
        assert found.steps == 2 * (n - 1)
        assert found.messages == [2 * (n - 1)] * n
        chunks = lengths(size, n)
        # In either round a rank sends all chunks but one.
        assert found.sent == [
            2 * size - chunks[(rank + 1) % n] - chunks[(rank + 2) % n] for rank in range(n)
        ]
        assert sum(found.sent) == 2 * (n - 1) * size
        assert set(found.pairs) == {(rank, (rank + 1) % n) for rank in range(n)}
        if size == EVEN:
            assert found.sent == [2 * (n - 1) * size // n] * n

    def test_two_shot(self, n: int, size: int) -> None:
        found = counted("two_shot", n, size)
        assert found.steps == 2
        assert found.messages == [2 * (n - 1)] * n
        chunks = lengths(size, n)
        assert found.sent == [size - chunk + (n - 1) * chunk for chunk in chunks]
        assert sum(found.sent) == 2 * (n - 1) * size
        if size == EVEN:
            assert found.sent == [2 * (n - 1) * size // n] * n

    def test_halving_doubling(self, n: int, size: int) -> None:
        found = counted("halving_doubling", n, size)
        levels = n.bit_length() - 1  # the logarithm, rounded down
        p = 1 << levels
        extra = n - p
        assert found.steps == 2 * levels + (2 if extra else 0)
        standing = [2 * levels + 1] * extra + [2 * levels] * (p - extra)
        assert found.messages == standing + [1] * extra
        assert sum(found.sent) == 2 * (p - 1) * size + 2 * extra * size
        assert found.sent[p:] == [size] * extra
        if size == EVEN:
            own = 2 * (p - 1) * size // p
            assert found.sent[:p] == [own + size] * extra + [own] * (p - extra)


@pytest.mark.parametrize("size", [EVEN, UNEVEN])
@pytest.mark.parametrize(("n", "g"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (8, 1), (4, 4)])
def test_hierarchical_counts(n: int, g: int, size: int) -> None:
    domains = tuple(tuple(range(start, start + g)) for start in range(0, n, g))
    count = len(domains)
    found = counted("hierarchical", n, size, domains)
    assert found.steps == (2 if g > 1 else 0) + (2 if count > 1 else 0)
    assert found.messages == [2 * (g - 1) + 2 * (count - 1)] * n
    across = [
        sum(sent for (a, b), sent in found.pairs.items() if a == rank and a // g != b // g)
        for rank in range(n)
    ]
    assert sum(across) == 2 * (count - 1) * size
    inside = sum(found.sent) - sum(across)
    assert inside == count * 2 * (g - 1) * size
    if size == EVEN:
        assert across == [2 * (count - 1) * size // g // count] * n


def test_hierarchical_domains_of_unequal_sizes() -> None:
    domains = ((0, 3, 4), (1,), (2, 5))
    found = counted("hierarchical", 6, UNEVEN, domains)
    assert found.result == [[Counter(range(6))] * UNEVEN] * 6
    home = {rank: i for i, domain in enumerate(domains) for rank in domain}
    across = sum(sent for (a, b), sent in found.pairs.items() if home[a] != home[b])
    assert across == 2 * (len(domains) - 1) * UNEVEN


def test_what_a_transport_is_told() -> None:
    """Two ranks, two-shot: the own chunk is reduced where the peer reads it, and in the result."""
    first, second = all_reduce_programs("two_shot", 4, 2)
    assert first == [
        Send(1, 2, 4, 0, fresh=True),
        Receive((0, 1), 0, 2, True, (-1, 0), (True, True), kept=True, final=True),
        Send(1, 0, 2, 1, fresh=False),
        Receive((1,), 2, 4, False, (1,), (False,), kept=False, final=True),
    ]
    assert messages_per_pair([first, second]) == 2


@pytest.mark.parametrize(
    ("programs", "complaint"),
    [
        ([[Send(1, 0, 2)], []], "receives less"),
        ([[], [Receive((0,), 0, 2)]], "receives more"),
        ([[Send(1, 0, 2)], [Receive((0,), 0, 1)]], "rank 1 receives"),
        (
            [[Receive((1,), 0, 2), Send(1, 0, 3)], [Send(0, 0, 2), Receive((0,), 0, 3)]],
            "only a part",
        ),
    ],
)
def test_programs_that_do_not_fit_together(programs, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        link(programs)


def test_programs_that_wait_for_each_other() -> None:
    stuck = [[Receive((1,), 0, 1), Send(1, 0, 1)], [Receive((0,), 0, 1), Send(0, 0, 1)]]
    with pytest.raises(ValueError, match="wait for each other"):
        record(link(stuck), 1)


def test_a_wrong_mark_is_found() -> None:
    pair = [[Send(1, 0, 1), Receive((0, 1), 0, 1)], [Send(0, 0, 1), Receive((0, 1), 0, 1)]]
    with pytest.raises(ValueError, match="not marked"):
        record(link(pair), 1)
