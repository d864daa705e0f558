"""The race checker's judgement, on recordings written by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fusedcomm.testing.races import Event, Launch, Recording, addresses, check, record
from fusedcomm.testing.races.addresses import merged, of_tensor
from fusedcomm.testing.races.recording import replaced


def step(kind, where="data", span=(0, 4), *, of=None, value=None, before=None, wanted=None):
    """An access without the rank; ``of`` is (launch, program), or None on the host."""
    launch, program = (None, None) if of is None else (Launch(of[0], f"kernel {of[0]}"), (of[1],))
    return Event(0, launch, program, kind, where, (span,), value, before, wanted, f"{kind} {where}")


def write(where="data", span=(0, 4), of=None):
    return step("write", where, span, of=of)


def read(where="data", span=(0, 4), of=None):
    return step("read", where, span, of=of)


def raise_(flag, value=1, before=None, of=None):
    before = value - 1 if before is None else before
    return step("release", flag, of=of, value=value, before=before)


def await_(flag, wanted=1, seen=None, of=None):
    return step("acquire", flag, of=of, value=wanted if seen is None else seen, wanted=wanted)


def count(value, of):
    return step("count", "counter", of=of, value=value, before=value - 1)


def clear(of):
    return step("relaxed", "counter", of=of, value=0)


def races(*ranks, names=None):
    """The races of what each rank did, whichever rank is looked at first."""
    recordings = [
        Recording(number, [event._replace(rank=number) for event in events], names or {})
        for number, events in enumerate(ranks)
    ]
    found = [check(order) for order in itertools.permutations(recordings)]
    assert len({len(each) for each in found}) == 1
    return found[0]


def beside(event):
    """The same on a stream beside the main one."""
    return event._replace(stream="copy")


def test_streams_are_ordered_by_forks_and_joins_alone():
    fork, forked = raise_("fork"), beside(await_("fork"))
    join, joined = beside(raise_("join")), await_("join")
    assert len(races([write(), beside(read())])) == 1
    assert races([write(), fork, forked, beside(read())]) == []
    assert len(races([fork, forked, write(), beside(read())])) == 1
    assert len(races([fork, forked, beside(read()), write()])) == 1
    assert races([fork, forked, beside(read()), join, joined, write()]) == []
    launches = [beside(write(of=(0, program))) for program in range(2)]
    assert len(races([fork, forked, *launches])) == 1
    assert races([fork, forked, launches[0], beside(read())]) == []


def test_what_conflicts():
    assert len(races([write()], [read()])) == 1
    assert len(races([write()], [write()])) == 1
    assert races([read()], [read()]) == []
    assert races([write(), read(), write()]) == []
    assert races([write(span=(0, 4))], [write(span=(4, 8))]) == []
    assert len(races([write(span=(0, 5))], [read(span=(4, 8))])) == 1
    assert races([write("here")], [write("there")]) == []
    assert races([write()], []) == []


def test_all_ranges_count():
    scattered = write()._replace(ranges=((0, 2), (8, 10), (16, 18)))
    assert races([scattered], [read(span=(2, 8))]) == []
    assert len(races([scattered], [read(span=(3, 9))])) == 1
    assert races([scattered], [read(span=(16, 17))])[0].range == (16, 17)


def test_atomic_accesses_do_not_race_with_each_other():
    assert races([raise_("flag")], [raise_("flag")]) == []
    assert races([raise_("flag")], [step("relaxed", "flag", value=3)]) == []
    assert len(races([raise_("flag")], [read("flag")])) == 1
    assert len(races([write("flag")], [await_("flag")])) == 1
    assert races([read("flag")], [await_("flag")]) == []


def test_a_flag_orders_what_came_before_its_release():
    reader = [await_("flag"), read()]
    assert races([write(), raise_("flag")], reader) == []
    assert len(races([raise_("flag"), write()], reader)) == 1
    assert len(races([write(), raise_("flag")], [read(), await_("flag")])) == 1
    assert len(races([write(), raise_("other")], reader)) == 1
    assert len(races([write(), step("relaxed", "flag", value=1)], reader)) == 1


def test_flags_order_in_a_chain():
    middle = [await_("flag"), raise_("next")]
    assert races([write(), raise_("flag")], middle, [await_("next"), write()]) == []
    assert len(races([write(), raise_("flag")], middle[::-1], [await_("next"), write()])) == 1


def test_only_the_first_sufficient_value_is_certain():
    """The wait saw 3, but 1 or 2 would have been enough for it."""
    writer = [write(span=(0, 4)), raise_("flag", 1), write(span=(4, 8)), raise_("flag", 3, 1)]
    assert races(writer, [await_("flag", 1, seen=3), read(span=(0, 4))]) == []
    assert len(races(writer, [await_("flag", 1, seen=3), read(span=(4, 8))])) == 1
    assert races(writer, [await_("flag", 2, seen=3), read(span=(4, 8))]) == []
    by_chance = step("acquire", "flag", value=3)  # not a wait: nothing but 3 was seen
    assert races(writer, [by_chance, read(span=(4, 8))]) == []


def test_a_flag_that_was_high_before_orders_nothing():
    assert len(races([write(), raise_("flag", 6, 5)], [await_("flag", 5, seen=6), read()])) == 1
    assert races([write(), raise_("flag", 6, 5)], [await_("flag", 6), read()]) == []
    assert len(races([write()], [await_("flag", 5), read()])) == 1


def test_values_wrap_around():
    last, first = 2**31 - 1, -(2**31)
    writer = [raise_("flag", last), write(), raise_("flag", first, last)]
    assert races(writer, [await_("flag", first), read()]) == []
    assert len(races(writer, [await_("flag", last, seen=first), read()])) == 1


def test_a_slot_used_one_epoch_early():
    """A writer that awaits consumed >= e - 2, although the reader had been quicker than that."""

    def calls(late):
        writer, reader = [], []
        for epoch in (1, 2, 3):
            writer += [await_("consumed", epoch - 1 - late, seen=epoch - 1), write()]
            writer += [raise_("ready", epoch)]
            reader += [await_("ready", epoch), read(), raise_("consumed", epoch)]
        return writer, reader

    assert races(*calls(late=0)) == []
    assert len(races(*calls(late=1))) == 1


def test_two_who_may_raise_a_flag_first():
    """What only one of them has written is not certain."""
    one, two = [write(span=(0, 4)), raise_("flag")], [write(span=(4, 8)), raise_("flag")]
    (race,) = races(one, two, [await_("flag"), read(span=(0, 8))])
    assert race.count == 2
    beside = [event._replace(launch=Launch(0, "k"), program=(0,)) for event in one]
    beside += [event._replace(launch=Launch(0, "k"), program=(1,)) for event in two]
    (race,) = races(beside, [await_("flag"), read(span=(0, 8))])
    assert race.count == 2
    before_both = [write(), raise_("start")]
    waits = [await_("start"), raise_("flag")]
    assert races(before_both, waits, waits, [await_("flag"), read()]) == []


def test_a_release_that_follows_from_the_wait_cannot_have_ended_it():
    waiter = [await_("flag"), read(), raise_("back")]
    assert races([write(), raise_("flag")], waiter, [await_("back"), raise_("flag")]) == []


def test_launches_are_ordered_and_their_programs_are_not():
    assert races([write(of=(0, 0)), write(of=(0, 0))]) == []
    assert len(races([write(of=(0, 0)), read(of=(0, 1))])) == 1
    assert races([write(of=(0, 0)), read(of=(1, 1)), read(of=(1, 0))]) == []
    assert races([write(), read(of=(0, 0)), read(of=(0, 1)), write()]) == []


def test_a_program_passes_on_what_its_launch_and_host_knew():
    writer = [write(), raise_("flag")]
    assert races(writer, [await_("flag"), read(of=(0, 0)), read(of=(0, 1))]) == []
    assert races(writer, [await_("flag", of=(0, 0)), read(of=(1, 3))]) == []
    assert races(writer, [await_("flag", of=(0, 0)), read()]) == []
    assert races(writer, [read("x", of=(0, 0)), await_("flag"), read(of=(1, 0))]) == []
    assert len(races(writer, [await_("flag", of=(0, 0)), read(of=(0, 1))])) == 1


def test_a_counter_orders_all_before_the_last():
    def produce(last):
        return [
            *(write(span=(0, 4), of=(0, 0)), count(1, (0, 0))),
            *(write(span=(4, 8), of=(0, 1)), count(2, (0, 1)), *last),
        ]

    reader = [await_("flag"), read(span=(0, 8))]
    assert races(produce([clear((0, 1)), raise_("flag", of=(0, 1))]), reader) == []
    assert races(produce([raise_("flag", of=(0, 1))]), reader) == []
    by_first = [raise_("flag", of=(0, 0))]
    assert len(races(produce(by_first), reader)) == 1  # it had not seen the other one's count


def test_a_count_that_was_not_the_last_orders_nothing():
    """Program 1 came after program 0 by chance; the next time it may be the other way round."""
    counting = [
        *(write(of=(0, 0)), count(1, (0, 0))),
        *(count(2, (0, 1)), read(of=(0, 1))),
        *(count(3, (0, 2)), read(of=(0, 2))),
    ]
    found = races(counting)
    assert len(found) == 1 and found[0].second.program == (1,)


def test_a_counter_that_is_not_acquired_and_released():
    relaxed = step("relaxed", "counter", of=(0, 0), value=1)
    assert len(races([write(of=(0, 0)), relaxed, count(2, (0, 1)), read(of=(0, 1))])) == 1


def test_a_round_of_counts_ends_when_the_counter_is_cleared():
    first = [write(of=(0, 0)), count(1, (0, 0)), clear((0, 0))]
    assert len(races([*first, count(1, (0, 1)), read(of=(0, 1))])) == 1


def test_recordings_that_do_not_belong_together():
    with pytest.raises(ValueError, match="nothing that was recorded ends acquire of value 1"):
        races([await_("a"), raise_("b", before=0)], [await_("b"), raise_("a", before=0)])


def test_a_report_names_both_sides_once():
    writes = [write(span=(start, start + 4), of=(3, 1)) for start in (0, 4, 8)]
    names = {"data": "workspace gather of rank 1"}
    (race,) = races(writes, [read(span=(0, 12))], names=names)
    assert race.count == 3
    assert str(race) == (
        "race on workspace gather of rank 1, bytes 0..4, 3 times: nothing orders\n"
        "  write by rank 0, launch 3 (kernel 3), program 1, at write data\n"
        "  read by rank 1, at read data"
    )


def test_ranges_of_elements():
    assert merged(np.array([64], dtype=np.uint64), 4).tolist() == [[64, 68]]
    scattered = np.array([[80, 64], [68, 84]], dtype=np.uint64)
    assert merged(scattered, 4).tolist() == [[64, 72], [80, 88]]
    assert merged(np.array([64, 64, 66], dtype=np.uint64), 2).tolist() == [[64, 68]]


def test_ranges_of_tensors():
    base = torch.arange(24, dtype=torch.int16).view(4, 6)

    def ranges(tensor):
        return (of_tensor(tensor) - base.data_ptr()).tolist()

    assert ranges(base) == [[0, 48]]
    assert ranges(base.t()) == [[0, 48]]
    assert ranges(base[1:3]) == [[12, 36]]
    assert ranges(base[1:3, 2:4]) == [[16, 20], [28, 32]]
    assert ranges(base[0, ::2]) == [[0, 2], [4, 6], [8, 10]]
    assert ranges(base[:0]) == []
    assert ranges(base[1, :1].expand(5)) == [[12, 14]]
    assert ranges(base[2, 3]) == [[30, 32]]


def test_one_recording_at_a_time():
    with record() as recording:
        with pytest.raises(RuntimeError, match="records already"):
            with record():
                pass
        torch.zeros(3).add_(1)
    assert recording.events == []
    with record():
        pass


def test_what_a_module_does_not_have_is_not_replaced():
    with replaced(addresses, merged=None):
        assert addresses.merged is None
    assert addresses.merged is merged
    with (
        pytest.raises(AttributeError, match="has no merge of its own"),
        replaced(addresses, merge=1),
    ):
        pass
    assert not hasattr(addresses, "merge")
