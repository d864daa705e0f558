"""The protocol is right in every interleaving of small cases, and planted mistakes are found."""

from __future__ import annotations

import doctest
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from fusedcomm import protocol
from fusedcomm.testing import protocol_model
from fusedcomm.testing.protocol_model import SLOTS, Call, Mutation, Setting, check, slot_sequences

#: Three calls before the epochs wrap in int32.
NEAR_WRAP = 2**31 - 3

both_directions = pytest.mark.parametrize("pull", [True, False], ids=["pull", "push"])


def on_slots(*slots: int, **call: Any) -> tuple[Call, ...]:
    """Calls that are alike but for their slots."""
    return tuple(Call(slot, **call) for slot in slots)


def settings(ranks: int, longest: int, **options: Any) -> Iterator[Setting]:
    """Every slot sequence of up to `longest` calls."""
    for slots in slot_sequences(longest):
        yield Setting(ranks=ranks, calls=on_slots(*slots), **options)


def assert_no_fault(cases: Iterable[Setting], *, reduce: bool = False) -> int:
    """All interleavings of all cases are right; the number of states they have."""
    states = 0
    for setting in cases:
        result = check(setting, reduce=reduce)
        assert result.fault is None, f"{setting}\n{result.fault}"
        states += result.states
    return states


def test_the_model_has_the_slots_of_the_code() -> None:
    assert SLOTS == protocol.SLOTS


def test_the_module_docstring_is_true() -> None:
    tried = doctest.testmod(protocol_model)
    assert tried.attempted == 3
    assert tried.failed == 0


def test_a_setting_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="in_place"):
        Setting(ranks=2, calls=on_slots(0, in_place=True), pull=False)
    with pytest.raises(ValueError, match="programs=None"):
        Setting(ranks=2, calls=on_slots(0), programs=(1, 1), boards=True)


# The protocol is right.


@pytest.mark.parametrize("epoch", [0, NEAR_WRAP], ids=["from 0", "across the wrap"])
@both_directions
def test_two_ranks_every_slot_sequence_up_to_five_calls(pull: bool, epoch: int) -> None:
    assert assert_no_fault(settings(2, 5, pull=pull, epoch=epoch)) > 10_000


@both_directions
def test_three_ranks_every_slot_sequence_up_to_three_calls(pull: bool) -> None:
    assert assert_no_fault(settings(3, 3, pull=pull)) > 40_000


@both_directions
def test_three_ranks_reuse_one_slot_across_the_wrap(pull: bool) -> None:
    assert_no_fault([Setting(ranks=3, calls=on_slots(0, 0, 0, 0), pull=pull, epoch=NEAR_WRAP)])


@both_directions
def test_four_ranks_every_slot_sequence_up_to_two_calls(pull: bool) -> None:
    assert_no_fault(settings(4, 2, pull=pull), reduce=True)


@both_directions
def test_consumed_may_be_raised_after_all_sources_are_read(pull: bool) -> None:
    assert_no_fault(settings(2, 4, pull=pull, release_last=True))
    assert_no_fault(settings(3, 2, pull=pull, release_last=True))


@both_directions
def test_calls_with_few_and_with_many_chunks_in_any_order(pull: bool) -> None:
    for slots, chunks in product(product(range(SLOTS), repeat=3), product((1, 2, 3), repeat=3)):
        calls = tuple(Call(slot, chunks=n) for slot, n in zip(slots, chunks, strict=True))
        assert_no_fault([Setting(ranks=2, calls=calls, pull=pull)])


@both_directions
def test_chunks_without_rows_in_any_place(pull: bool) -> None:
    places = list(product(range(2), range(2)))  # (source, chunk)
    for kept in product((True, False), repeat=len(places)):
        empty = tuple(place for place, keep in zip(places, kept, strict=True) if not keep)
        for slots in slot_sequences(2):
            first, *rest = on_slots(*slots, chunks=2)
            calls = (Call(first.slot, chunks=2, empty=empty), *rest, first)
            assert_no_fault([Setting(ranks=2, calls=calls, pull=pull)])


@both_directions
def test_calls_with_one_source_that_may_change(pull: bool) -> None:
    """Broadcast: only one rank writes, from call to call another one."""
    for slots in slot_sequences(3):
        for roots in product(range(3), repeat=len(slots)):
            calls = tuple(
                Call(slot, sources=(root,)) for slot, root in zip(slots, roots, strict=True)
            )
            assert_no_fault([Setting(ranks=3, calls=calls, pull=pull)])


def test_the_callers_own_tensor_read_in_place_beside_calls_that_copy() -> None:
    for slots in slot_sequences(4):
        for in_place in product((True, False), repeat=len(slots)):
            calls = tuple(Call(s, in_place=p) for s, p in zip(slots, in_place, strict=True))
            assert_no_fault([Setting(ranks=2, calls=calls)])
    assert_no_fault([Setting(ranks=3, calls=on_slots(0, 0, 1, in_place=True))])


@both_directions
def test_two_channels_at_once(pull: bool) -> None:
    assert_no_fault(settings(2, 2, pull=pull, channels=2))


@pytest.mark.parametrize("programs", [(1, 1), (2, 1), (1, 2)])
@both_directions
def test_programs_of_one_launch_in_any_order(pull: bool, programs: tuple[int, int]) -> None:
    assert_no_fault(settings(2, 2, pull=pull, programs=programs), reduce=True)


def test_boards_are_compared_only_when_they_are_of_the_same_call() -> None:
    assert_no_fault(settings(2, 3, boards=True))


# Mistakes are found.


def case(kind: str, *calls: Call, **options: Any) -> tuple[str, Setting]:
    """What two ranks that make the calls must run into, once there is a mistake."""
    return kind, Setting(ranks=2, calls=calls, **options)


PLANTED = {
    Mutation.NO_CONSUMED_WAIT: case("torn read", *on_slots(0, 0)),
    Mutation.REUSE_ONE_EARLY: case("torn read", *on_slots(0, 0)),
    Mutation.SIGNAL_BEFORE_STORE: case("stale read", Call(0)),
    Mutation.NO_READY_WAIT: case("stale read", Call(0)),
    Mutation.CONSUMED_BEFORE_READ: case("torn read", *on_slots(0, 0)),
    Mutation.COUNTED_FLAGS: case("deadlock", Call(0), Call(0, chunks=2)),
    Mutation.EMPTY_NOT_SIGNALLED: case("deadlock", Call(0, empty=((1, 0),))),
    Mutation.UNREAD_NOT_CONSUMED: case("deadlock", Call(0, sources=(0,)), Call(0, sources=(1,))),
    Mutation.PLAIN_COMPARISON: case("stale read", *on_slots(0, 0, 0), epoch=NEAR_WRAP),
    Mutation.SHARED_FLAG: case("stale read", Call(0), channels=2),
    Mutation.FIRST_PRODUCER_SIGNALS: case("stale read", Call(0), programs=(2, 1)),
    Mutation.FIRST_READER_RELEASES: case("torn read", *on_slots(0, 0), programs=(1, 2)),
    Mutation.IN_PLACE_ENDS_EARLY: case("torn read", *on_slots(0, 1, in_place=True)),
    Mutation.BOARD_NOT_WITHDRAWN: case("false mismatch", *on_slots(0, 1), boards=True),
    Mutation.BOARD_LOOKED_AT_ONCE: case("false mismatch", *on_slots(0, 1), boards=True),
}


def test_every_mistake_is_planted() -> None:
    assert set(PLANTED) == set(Mutation)


@pytest.mark.parametrize("reduce", [False, True], ids=["all orders", "reduced"])
@pytest.mark.parametrize("mutation", Mutation, ids=lambda mutation: mutation.name)
def test_a_planted_mistake_is_found(mutation: Mutation, reduce: bool) -> None:
    kind, pulled = PLANTED[mutation]
    # What is pushed lies with its reader: there is nothing to read in place.
    in_place = any(call.in_place for call in pulled.calls)
    for right in [pulled] if in_place else [pulled, replace(pulled, pull=False)]:
        assert_no_fault([right], reduce=reduce)
        fault = check(replace(right, mutation=mutation), reduce=reduce).fault
        assert fault is not None
        assert fault.kind == kind


@pytest.mark.parametrize("mutation", [Mutation.NO_CONSUMED_WAIT, Mutation.REUSE_ONE_EARLY])
@both_directions
def test_overwriting_too_early_shows_only_when_a_slot_is_used_twice_in_a_row(
    pull: bool, mutation: Mutation
) -> None:
    """Between two uses of a slot, a call on the other one awaits every peer's signal.

    So tests that let the host alternate can never miss step 1; a captured graph would.
    """
    for ranks, longest in (2, 5), (3, 3):
        for slots in slot_sequences(longest):
            setting = Setting(ranks=ranks, calls=on_slots(*slots), pull=pull, mutation=mutation)
            repeated = any(a == b for a, b in pairwise(slots))
            assert (check(setting).fault is not None) == repeated, setting


@both_directions
def test_overwriting_too_early_shows_on_alternating_slots_where_data_goes_one_way(
    pull: bool,
) -> None:
    calls = on_slots(0, 1, 0, sources=(0,))
    setting = Setting(ranks=2, calls=calls, pull=pull, mutation=Mutation.NO_CONSUMED_WAIT)
    fault = check(setting).fault
    assert fault is not None
    assert fault.kind == "torn read"


def test_counted_flags_go_wrong_only_where_a_call_has_fewer_chunks_than_a_later_one() -> None:
    for chunks in product((1, 2), repeat=3):
        calls = tuple(Call(0, chunks=n) for n in chunks)
        setting = Setting(ranks=2, calls=calls, mutation=Mutation.COUNTED_FLAGS)
        grows = any(a < b for a, b in pairwise(chunks))
        assert (check(setting).fault is not None) == grows, setting


def test_plain_comparison_goes_wrong_only_across_the_wrap() -> None:
    mutation = Mutation.PLAIN_COMPARISON
    assert_no_fault(settings(2, 5, mutation=mutation))
    for slots in slot_sequences(5):
        calls = on_slots(*slots)
        fault = check(Setting(ranks=2, calls=calls, epoch=NEAR_WRAP, mutation=mutation)).fault
        wraps = max(slots.count(slot) for slot in range(SLOTS)) > 2
        assert (fault is not None) == wraps, slots


@pytest.mark.parametrize("mutation", [None, *Mutation], ids=lambda m: m.name if m else "right")
def test_the_reduction_leaves_out_states_and_changes_no_verdict(mutation: Mutation | None) -> None:
    epoch = NEAR_WRAP if mutation is Mutation.PLAIN_COMPARISON else 0
    boards = mutation in (Mutation.BOARD_NOT_WITHDRAWN, Mutation.BOARD_LOOKED_AT_ONCE)
    all_states = reduced_states = 0
    for slots, pull in product(slot_sequences(3), (True, False)):
        calls = tuple(
            Call(slot, chunks=1 + i % 2, sources=(0,) if i == 2 else None, empty=((0, 1),))
            for i, slot in enumerate(slots)
        )
        setting = Setting(
            ranks=2, calls=calls, pull=pull, epoch=epoch, boards=boards, mutation=mutation
        )
        everything, reduced = check(setting), check(setting, reduce=True)
        assert (everything.fault is None) == (reduced.fault is None), setting
        all_states += everything.states
        reduced_states += reduced.states
    assert reduced_states < all_states


def test_a_fault_is_told_as_the_steps_of_the_ranks_in_their_order() -> None:
    _, right = PLANTED[Mutation.NO_CONSUMED_WAIT]
    fault = check(replace(right, mutation=Mutation.NO_CONSUMED_WAIT)).fault
    kind, *steps = str(fault).splitlines()
    assert kind == "torn read"
    assert [step[:4] for step in steps] == [f"{i:4}" for i in range(1, 13)]
    assert [step[6:] for step in steps[-4:]] == [
        "rank 0, call 1 (slot 0, epoch 1): set consumed[slot 0][reader 0] = 1 on rank 1",
        "rank 0, call 2 (slot 0, epoch 2): begin to write chunk 0 of rank 0 in slot 0",
        "rank 1, call 1 (slot 0, epoch 1): await ready[slot 0][source 0][chunk 0] >= 1, sees 1",
        "rank 1, call 1 (slot 0, epoch 1): read chunk 0 of rank 0 in slot 0, sees half of it",
    ]


def test_a_deadlock_names_who_waits_for_what() -> None:
    _, right = PLANTED[Mutation.EMPTY_NOT_SIGNALLED]
    fault = check(replace(right, mutation=Mutation.EMPTY_NOT_SIGNALLED)).fault
    assert fault is not None
    waits = "rank 0, call 1 (slot 0, epoch 1): await ready[slot 0][source 1][chunk 0] >= 1, sees 0"
    assert fault.steps[-1] == f"{waits}: for ever"
