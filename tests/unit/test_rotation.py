"""When a rank goes round its banks, by the times that it took."""

from fusedcomm.protocol.rotation import Rotation

SLOW, FAST = (0.7, 1.0), (0.4, 1.0)


def calls_going_round(rotation: Rotation) -> int:
    count = 0
    while rotation.on:
        rotation.judge(*FAST)
        count += 1
    return count


def test_two_slow_calls_in_a_row_begin_it() -> None:
    rotation = Rotation()
    for times in (SLOW, FAST, SLOW, FAST, FAST):
        rotation.judge(*times)
        assert not rotation.on
    rotation.judge(*SLOW)
    rotation.judge(*SLOW)
    assert rotation.on


def test_it_tries_again_less_often_while_that_stays_slow() -> None:
    rotation = Rotation()
    rounds = []
    for _ in range(6):
        rotation.judge(*SLOW)
        rotation.judge(*SLOW)
        rounds.append(calls_going_round(rotation))
    assert rounds == [16, 32, 64, 128, 256, 256]
    rotation.judge(*FAST)
    rotation.judge(*SLOW)
    rotation.judge(*SLOW)
    assert calls_going_round(rotation) == 16


def test_half_is_not_slow() -> None:
    rotation = Rotation()
    for _ in range(4):
        rotation.judge(0.5, 1.0)
    assert not rotation.on
