"""Where rows of a mixture of experts go: examples, and properties against a loop in Python."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.engines import blocks
from fusedcomm.engines.host import units
from fusedcomm.planning import capacity, relaying, routing
from fusedcomm.planning.capacity import drop
from fusedcomm.planning.routing import (
    MAX_PIECES,
    PIECE_ROWS,
    Layout,
    chunk,
    chunks,
    columns_of,
    pieces,
    place,
    sort_choices,
)


def test_examples_in_the_docstrings() -> None:
    for module in (routing, capacity, relaying, units, blocks):
        results = doctest.testmod(module)
        assert results.attempted and not results.failed


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], int, list[np.ndarray]]:
    """World size, E, owners, align, and every rank's ids, some of which are no expert's."""
    world_size = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    owner = st.integers(0, world_size - 1)
    owners = draw(st.just(()) | st.tuples(*[owner] * experts))
    k = draw(st.integers(1, 4))
    ids = [
        np.array(
            draw(st.lists(st.integers(-1, experts), min_size=tokens * k, max_size=tokens * k)),
            dtype=np.int64,
        ).reshape(tokens, k)
        for tokens in draw(st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size))
    ]
    return world_size, experts, owners, draw(st.integers(1, 5)), ids


def owner_of(expert: int, world_size: int, experts: int, owners: tuple[int, ...]) -> int:
    return owners[expert] if owners else expert // -(-experts // world_size)


@settings(deadline=None)
@given(routings())
def test_rows_are_sorted_by_expert_source_token(given_: tuple) -> None:
    world_size, experts, owners, align, ids = given_
    placement = place(experts, world_size, owners)
    sorted_ = [sort_choices(columns_of(own, placement), experts) for own in ids]
    layout = Layout(np.stack([counts for counts, _, _ in sorted_]), placement, align)
    for reader in range(world_size):
        # A loop in Python over what the words say.
        right: list[tuple[int, int, int] | None] = []
        for expert in range(experts):
            if owner_of(expert, world_size, experts, owners) != reader:
                continue
            rows = [
                (source, token, choice)
                for source, own in enumerate(ids)
                for token, choice in np.argwhere(own == expert)
            ]
            right += rows + [None] * (-len(rows) % align)
        found: list[tuple[int, int, int] | None] = [None] * int(layout.received[reader])
        for source, (_, order, _) in enumerate(sorted_):
            for column in placement.columns(reader):
                sent = int(layout.sent_row_WE[source, column])
                first = int(layout.first_row_WE[source, column])
                for i in range(int(layout.counts_WE[source, column])):
                    token, choice = divmod(int(order[sent + i]), ids[source].shape[1])
                    found[first + i] = (source, token, choice)
        assert found == right
    for own, (_, order, slot) in zip(ids, sorted_, strict=True):
        valid = (own >= 0) & (own < experts)
        assert ((slot >= 0) == valid).all()
        assert (order[slot[valid]] == np.flatnonzero(valid)).all()


@settings(deadline=None)
@given(routings(), st.integers(0, 12))
def test_the_last_choices_find_no_room(given_: tuple, room: int) -> None:
    world_size, experts, owners, align, ids = given_
    placement = place(experts, world_size, owners)
    columns = [columns_of(own, placement) for own in ids]
    table = np.stack([sort_choices(own, experts)[0] for own in columns])
    # A loop in Python: each choice in turn, until the first that a rank has no room for.
    rows = np.zeros(experts, dtype=np.int64)
    full = [False] * world_size
    right = [own.copy() for own in columns]
    for source, own in enumerate(ids):
        for token, choice in np.argwhere((own >= 0) & (own < experts)):
            column = columns[source][token, choice]
            reader = owner_of(own[token, choice], world_size, experts, owners)
            rows[column] += 1
            here = placement.columns(reader)
            padded = (-(-rows // align) * align)[here.start : here.stop].sum()
            if full[reader] or padded > room:
                full[reader] = True
                rows[column] -= 1
                right[source][token, choice] = experts
    for source, own in enumerate(columns):
        found = drop(own, source, table, placement, align, room)
        assert (found == right[source]).all()


@settings(deadline=None)
@given(st.integers(0, 3 * MAX_PIECES * PIECE_ROWS))
def test_pieces_cover_a_segment_and_have_flags_of_their_own(rows: int) -> None:
    placement = place(2, 1)
    cut = pieces(rows)
    assert [row for _, first, last in cut for row in range(first, last)] == list(range(rows))
    assert [number for number, _, _ in cut] == list(range(len(cut)))
    assert len(cut) <= MAX_PIECES
    flags = [chunk(expert, piece) for expert in range(2) for piece in range(MAX_PIECES)]
    assert len(set(flags)) == len(flags) and max(flags) == chunks(placement) - 2


def test_offsets_do_not_overflow_32_bits() -> None:
    """The row arithmetic, and bytes made of it, is in 64 bits whatever the table came as."""
    layout = Layout(np.full((4, 2), 2**30, dtype=np.int64), place(2, 1))
    assert layout.first_row_WE[3, 1] == 7 * 2**30
    assert layout.received.tolist() == [2**33]
