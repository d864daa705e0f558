"""Control blocks: states, reasons, and boards that are read while they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm import board
from fusedcomm.board import BOARDS, ControlBlock
from fusedcomm.symmetric.shm import Segment

SPACE = 500  # bytes of text that an entry holds


def make(world_size: int = 2) -> ControlBlock:
    size = ControlBlock.size(world_size)
    segment = Segment.create("control", size)
    segment.release_descriptor()
    return ControlBlock(segment, world_size)


# States


def test_the_first_final_state_stays() -> None:
    block = make()
    assert (block.state, block.reason) == (board.RUNNING, "")
    block.set_state(board.ABORTED, "one")
    block.set_state(board.CLOSED, "two")
    assert (block.state, block.reason) == (board.ABORTED, "one")


@given(st.text(max_size=3000))
@settings(max_examples=30)
def test_a_reason_is_kept_as_far_as_there_is_space(reason: str) -> None:
    block = make()
    block.post(1, "call")
    block.set_state(board.ABORTED, reason)
    kept = block.reason.rstrip("�")  # of a character that was cut
    assert reason.startswith(kept)
    assert len(kept.encode()) >= min(len(reason.encode()), 1800)
    assert block.read(1) == "call"
    assert block.words[ControlBlock.barrier_index(0)] == 0


def test_a_state_that_one_thread_enters_stays_whatever_another_does() -> None:
    """The second comes in the middle of the first: while its reason is being written."""
    block = make()
    put_text, seen = block._put_text, []

    def fail_too() -> None:
        block.set_state(board.LOST, "second")
        seen.append((block.state, block.reason))

    other = threading.Thread(target=fail_too)

    def slow_put_text(start: int, text: str, space: int) -> None:
        if text == "first":
            other.start()
            other.join(0.2)
        put_text(start, text, space)

    block._put_text = slow_put_text  # type: ignore[method-assign]
    block.set_state(board.ABORTED, "first")
    other.join()
    assert seen == [(block.state, block.reason)]


# Boards


def test_a_board_holds_the_last_calls() -> None:
    block = make()
    for number in range(1, 3 * BOARDS + 1):
        assert not block.posted(number)
        assert block.read(number) is None
        block.post(number, f"call {number}")
        assert block.posted(number)
        for earlier in range(max(1, number - BOARDS - 3), number + 1):
            overwritten = earlier <= number - BOARDS
            assert block.read(earlier) == (None if overwritten else f"call {earlier}")
            assert block.posted(earlier)  # it has, though nothing is known of it any more


@pytest.mark.parametrize("world_size", [1, 2, 3, 100])
def test_nothing_overlaps(world_size: int) -> None:
    """All entries, the reason and the barrier's flags filled to the brim, none touched another."""
    block = make(world_size)
    words, text = block.words, "x" * SPACE
    for source in range(world_size):
        words[ControlBlock.barrier_index(source)] = source + 7
    for number in range(1, BOARDS + 1):
        block.post(number, text)
    block.set_state(board.LOST, "y" * 5000)
    assert block.state == board.LOST and set(block.reason) == {"y"}
    assert all(block.read(number) == text for number in range(1, BOARDS + 1))
    assert [words[ControlBlock.barrier_index(s)] for s in range(world_size)] == list(
        range(7, world_size + 7)
    )


@given(st.text(max_size=2 * SPACE), st.text(max_size=2 * SPACE))
def test_texts_longer_than_an_entry_stay_distinct(one: str, other: str) -> None:
    block = make()
    common = "z" * SPACE
    for text in (one, other, common + one, common + other):
        fitted = ControlBlock.fit(text)
        assert len(fitted.encode()) <= SPACE
        assert fitted == text or len(text.encode()) > SPACE
        block.post(1, fitted)
        assert block.read(1) == fitted
    assert (ControlBlock.fit(common + one) == ControlBlock.fit(common + other)) == (one == other)


class Memory:
    """Memory whose stores are withheld, and made visible one by one, as to another processor."""

    def __init__(self, block: ControlBlock) -> None:
        self.views = {name: getattr(block, name) for name in ("_words", "_bytes", "_numbers")}
        self.pending: list[Callable[[], None]] = []

    def view(self, name: str, before_load: Callable[[], None]) -> Any:
        memory, real = self, self.views[name]

        class View:
            def __setitem__(self, where: Any, value: Any) -> None:
                if isinstance(where, slice):  # a copy, of which a reader may see any part
                    for offset, byte in enumerate(value):
                        memory.store(real, where.start + offset, byte)
                else:
                    memory.store(real, where, value)

            def __getitem__(self, where: Any) -> Any:
                before_load()
                return real[where]

        return View()

    def store(self, view: memoryview, index: int, value: int) -> None:
        self.pending.append(lambda: view.__setitem__(index, value))

    def show(self, count: int) -> None:
        """Make some more of the stores visible, in their order (x86-64 keeps it)."""
        for store in self.pending[:count]:
            store()
        del self.pending[:count]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_reader_sees_a_torn_text(data: st.DataObject) -> None:
    """Whatever part of the stores a reader sees at each of its loads: one whole text or none."""
    texts = st.text(alphabet="ab", min_size=1, max_size=12)
    block = make()
    memory = Memory(block)
    known: dict[int, str] = {}
    number = data.draw(st.integers(1, 3))
    for step in range(data.draw(st.integers(1, 4))):
        writer = number + step * BOARDS  # all in one entry
        known[writer] = data.draw(texts)
        for name in memory.views:
            setattr(block, name, memory.view(name, lambda: None))
        block.post(writer, known[writer])

    def advance() -> None:
        memory.show(data.draw(st.integers(0, min(len(memory.pending), 15))))

    for name in memory.views:
        setattr(block, name, memory.view(name, advance))
    for _ in range(data.draw(st.integers(1, 8))):
        wanted = data.draw(st.sampled_from(sorted(known)))
        assert block.read(wanted) in (None, known[wanted])
    for name in memory.views:
        setattr(block, name, memory.view(name, lambda: None))
    memory.show(len(memory.pending))
    assert block.read(max(known)) == known[max(known)]
