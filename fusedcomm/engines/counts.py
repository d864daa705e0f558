"""Whether the ranks of an all-to-all agree on who sends how much."""

from __future__ import annotations

from collections.abc import Sequence

from fusedcomm.errors import MismatchError


def check_counts(rank: int, counts: Sequence[Sequence[int]], recv_counts: Sequence[int]) -> None:
    """Compare what the ranks send with what this one expects.

    Args:
        counts: ``counts[a][b]`` is how many rows rank a has for rank b.
        recv_counts: how many rows this rank expects of each.

    Raises:
        MismatchError: another rank sends not what this one expects.
    """
    for source, expected in enumerate(recv_counts):
        if counts[source][rank] != expected:
            raise MismatchError(
                f"ranks disagree on all_to_all's counts: rank {rank} expects "
                f"recv_counts[{source}] = {expected} rows of rank {source}, which has "
                f"send_counts[{rank}] = {counts[source][rank]} for it"
            )


def check_all_counts(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Compare what all ranks send with what all expect, so that all find the same difference.

    Args:
        counts: of each rank its send_counts, then its recv_counts.

    Returns:
        ``sends[a][b]``: how many rows rank a has for rank b.

    Raises:
        MismatchError: a rank sends not what another one expects.
    """
    world_size = len(counts)
    sends = [list(row[:world_size]) for row in counts]
    for rank, row in enumerate(counts):
        check_counts(rank, sends, row[world_size:])
    return sends
