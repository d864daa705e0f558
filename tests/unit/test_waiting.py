"""Waits on flags: counters that wrap around, and every way in which a wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedcomm import board
from fusedcomm.board import BOARDS, ControlBlock
from fusedcomm.errors import (
    AbortedError,
    ClosedError,
    FusedcommError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
)
from fusedcomm.symmetric.links import Links
from fusedcomm.symmetric.shm import Segment
from fusedcomm.waiting import Awaited, Watch, following, reached

INT32 = st.integers(-(2**31), 2**31 - 1)
AWAITED = Awaited("some_op", 7, 2, "data")


# Counters


@given(INT32, st.integers(0, 2**31 - 1))
def test_a_flag_that_is_ahead_has_reached(epoch: int, ahead: int) -> None:
    flag = (epoch + ahead + 2**31) % 2**32 - 2**31
    assert reached(flag, epoch)
    assert reached(epoch, flag) == (ahead == 0)


@given(INT32, st.integers(1, 200))
def test_counting_goes_on_past_the_wrap(epoch: int, steps: int) -> None:
    value = epoch
    for _ in range(steps):
        before, value = value, following(value)
        assert -(2**31) <= value < 2**31
        assert reached(value, before) and not reached(before, value)
    assert (value - epoch) % 2**32 == steps
    assert reached(value, epoch) and not reached(epoch, value)


def test_the_wrap_itself() -> None:
    assert following(2**31 - 1) == -(2**31)
    assert following(-1) == 0
    assert reached(-(2**31), 2**31 - 1)
    assert not reached(2**31 - 1, -(2**31))


# Waits


class Pair:
    """Rank 0's watch, and the block of a rank 1 that is not there: the test plays it."""

    def __init__(self, timeout_s: float = 60.0, world_size: int = 2) -> None:
        self.blocks = {rank: _block(world_size) for rank in range(world_size)}
        self.dead: set[int] = set()
        self.links = Links(0)
        self.links.alive = lambda peer: peer not in self.dead  # type: ignore[method-assign]
        self.watch = Watch(0, self.blocks, self.links, timeout_s)
        self.flag = memoryview(bytearray(4)).cast("i")
        self.watch.post("the call")
        for peer in range(1, world_size):
            self.blocks[peer].post(1, "the call")

    def wait(self) -> None:
        self.watch.wait(self.flag, 0, 5, 1, AWAITED)


def _block(world_size: int) -> ControlBlock:
    segment = Segment.create("control", ControlBlock.size(world_size))
    segment.release_descriptor()
    return ControlBlock(segment, world_size)


def later(action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.08, action)
    timer.start()
    return timer


@pytest.mark.parametrize("value", [5, 6, 2**31 - 1])
def test_a_wait_ends_with_its_flag(value: int) -> None:
    pair = Pair()
    later(lambda: pair.flag.__setitem__(0, value))
    pair.wait()


def test_a_wait_whose_flag_is_up_looks_at_nothing_else() -> None:
    pair = Pair()
    pair.flag[0] = 5
    pair.dead.add(1)
    pair.blocks[1].set_state(board.ABORTED, "whatever")
    pair.wait()


def test_a_death_is_no_fault_if_the_flag_came_before_it() -> None:
    """The flag goes up between the look at it and the look at the process."""
    pair = Pair()

    def alive(peer: int) -> bool:
        pair.flag[0] = 5
        return False

    pair.links.alive = alive  # type: ignore[method-assign]
    pair.wait()


Trouble = Callable[[Pair], object]

TROUBLES: dict[str, tuple[Trouble, type[FusedcommError], str]] = {
    "death": (
        lambda pair: pair.dead.add(1),
        PeerLostError,
        r"rank 0 waits for data in some_op \(epoch 7, chunk 2\) of rank 1, but rank 1 died",
    ),
    "closed": (
        lambda pair: pair.blocks[1].set_state(board.CLOSED, "it closed"),
        PeerLostError,
        "rank 1 closed its communicator",
    ),
    "aborted by the awaited": (
        lambda pair: pair.blocks[1].set_state(board.ABORTED, "rank 1 aborted: why"),
        AbortedError,
        "rank 1 aborted: why",
    ),
    "aborted by another": (
        lambda pair: pair.blocks[2].set_state(board.ABORTED, "rank 2 aborted: why"),
        AbortedError,
        "rank 2 aborted: why",
    ),
    "aborted by a thread of this rank": (
        lambda pair: pair.blocks[0].set_state(board.ABORTED, "rank 0 aborted: why"),
        AbortedError,
        "rank 0 aborted: why",
    ),
    "closed by a thread of this rank": (lambda pair: pair.watch.close(), ClosedError, "closed"),
    "a death that another found": (
        lambda pair: pair.blocks[2].set_state(board.LOST, "rank 2 waits for rank 3, but it died"),
        PeerLostError,
        "rank 3",
    ),
    "a timeout of another": (
        lambda pair: pair.blocks[2].set_state(board.TIMED_OUT, "rank 2 waited 1 s for rank 3"),
        PeerTimeoutError,
        "rank 3",
    ),
    "another call of the awaited": (
        lambda pair: pair.blocks[1].post(1, "another call"),
        MismatchError,
        r"call 1: rank 0 is in \[the call\], rank 1 in \[another call\]",
    ),
    "another call of a third rank": (
        lambda pair: pair.blocks[2].post(1, "another call"),
        MismatchError,
        r"rank 0 is in \[the call\], rank 2 in \[another call\]",
    ),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_wait_ends_with_the_right_error(name: str) -> None:
    trouble, error, words = TROUBLES[name]
    pair = Pair(world_size=3)
    later(lambda: trouble(pair))
    start = time.monotonic()
    with pytest.raises(error, match=words):
        pair.wait()
    assert time.monotonic() - start < 10


def test_the_death_of_a_rank_that_is_not_awaited_is_no_fault() -> None:
    pair = Pair(world_size=3)
    pair.dead.add(2)
    pair.blocks[2].set_state(board.CLOSED, "it closed")
    later(lambda: pair.flag.__setitem__(0, 5)).join()
    pair.wait()


def test_a_wait_ends_at_its_limit() -> None:
    pair = Pair(timeout_s=0.3)
    words = r"rank 0 waited 0.3 s for data in some_op \(epoch 7, chunk 2\) of rank 1"
    with pytest.raises(PeerTimeoutError, match=words):
        pair.wait()


def test_a_call_is_awaited_until_it_is_posted_and_then_compared() -> None:
    pair = Pair()
    pair.watch.post("second")
    later(lambda: pair.blocks[1].post(2, "second"))
    pair.watch.await_call(1, AWAITED)
    pair.watch.post("third")
    later(lambda: pair.blocks[1].post(3, "3rd"))
    with pytest.raises(MismatchError, match=r"call 3: .*\[third\].*\[3rd\]"):
        pair.watch.await_call(1, AWAITED)


def test_a_call_is_found_though_its_rank_is_gone_or_far_ahead() -> None:
    pair = Pair()

    def alive(peer: int) -> bool:  # it posts, does its part and dies between two looks
        pair.blocks[1].post(2, "second")
        return False

    pair.links.alive = alive  # type: ignore[method-assign]
    pair.watch.post("second")
    pair.watch.await_call(1, AWAITED)
    for number in range(3, BOARDS + 4):
        pair.blocks[1].post(number, "later")
    pair.watch.await_call(1, AWAITED)


def test_equal_texts_are_equal_however_long() -> None:
    pair = Pair()
    text = "sum of the gradient of " + ".".join(["a_long_name"] * 100)
    pair.watch.post(text)
    pair.blocks[1].post(2, pair.watch.text)
    pair.watch.compare(1)
    pair.blocks[1].post(2, ControlBlock.fit(text + "!"))
    with pytest.raises(MismatchError):
        pair.watch.compare(1)


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (PeerLostError("of a peer"), board.LOST, "of a peer"),
        (PeerTimeoutError("too late"), board.TIMED_OUT, "too late"),
        (MismatchError("not the same"), board.MISMATCHED, "not the same"),
        (AbortedError("by someone"), board.ABORTED, "by someone"),
        (RuntimeError("in user code"), board.ABORTED, "rank 0 failed .*RuntimeError.*in user code"),
        (KeyboardInterrupt(), board.ABORTED, "rank 0 failed .*KeyboardInterrupt"),
    ],
)
def test_a_failure_is_told_to_the_peers(error: BaseException, state: int, words: str) -> None:
    pair = Pair()
    pair.watch.fail(error)
    pair.watch.fail(RuntimeError("a later one"))
    assert pair.watch.state == state
    with pytest.raises(AssertionError if state == -1 else FusedcommError, match=words):
        pair.wait()
