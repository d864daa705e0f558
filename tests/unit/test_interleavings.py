"""The exploration goes through every order, and knows each kind of fault."""

from __future__ import annotations

import pytest

from fusedcomm.testing import interleavings as il
from fusedcomm.testing.interleavings import Program, Step, System


def system(*programs: list[tuple[int, str, int]], **initial: int) -> System:
    """Programs of steps (op, cell, value); the text of a step is its number."""
    made = System()
    for name, value in initial.items():
        made.cell(name, initial=value)
    for number, steps in enumerate(programs):
        position = made.cell("position", number)
        program = [
            Step(op, made.cell(cell), value, f"{number}.{i}")
            for i, (op, cell, value) in enumerate(steps)
        ]
        made.programs.append(Program(position, [*program, Step(il.END, 0, 0, "")]))
    return made


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_independent_steps_are_taken_in_every_order(programs: int) -> None:
    steps = [[(il.STORE, f"cell {n}", i) for i in range(4)] for n in range(programs)]
    result = system(*steps).explore()
    assert result.fault is None
    assert result.states == 5**programs


def test_reduced_waits_and_raised_flags_add_no_states() -> None:
    raises = [(il.SET, "flag", i) for i in range(1, 5)]
    waits = [(il.WAIT, "flag", i) for i in range(1, 5)]
    assert system(raises, waits).explore().states == 15
    assert system(raises, waits).explore(reduce=True).states == 2  # the first and the last


@pytest.mark.parametrize(
    ("kind", "write", "told"),
    [
        ("stale read", 3, ["1.0, sees 1"]),
        ("overwritten read", 3, ["0.0", "1.0, sees 3"]),
        ("torn read", il.TORN, ["0.0", "1.0, sees half of it"]),
    ],
)
def test_reads_of_other_data(kind: str, write: int, told: list[str]) -> None:
    wanted = 3 if kind == "stale read" else 1
    writer, reader = [(il.STORE, "data", write)], [(il.READ, "data", wanted)]
    fault = system(writer, reader, data=1).explore().fault
    assert fault == il.Fault(kind, tuple(told))


def test_a_flag_that_goes_back() -> None:
    fault = system([(il.SET, "flag", 2)], [(il.SET, "flag", 1)]).explore().fault
    assert fault == il.Fault("flag goes back", ("0.0", "1.0"))


def test_a_flag_may_wrap() -> None:
    last = 2**31 - 1
    setter = [(il.SET, "flag", il.int32(last + i)) for i in range(3)]
    waiter = [(il.WAIT, "flag", il.int32(last + i)) for i in range(3)]
    assert system(setter, waiter, flag=last - 1).explore().fault is None


def test_programs_that_wait_for_each_other() -> None:
    one = [(il.WAIT, "b", 1), (il.SET, "a", 1)]
    two = [(il.WAIT, "a", 1), (il.SET, "b", 1)]
    fault = system(one, two).explore().fault
    assert fault == il.Fault("deadlock", ("0.0, sees 0: for ever", "1.0, sees 0: for ever"))
