"""Rounds take turns on the links between hosts."""

import threading

from common.parallel.turns import SLACK, Turns


def blocked(turns: Turns, turn: int, passed: threading.Event) -> bool:
    """Whether a message of round `turn` has to wait; sets `passed` once it may go."""

    def send() -> None:
        turns.wait(turn)
        passed.set()

    threading.Thread(target=send, daemon=True).start()
    return not passed.wait(0.2)


def test_a_round_waits_for_all_but_the_last_messages_of_earlier_ones() -> None:
    turns, third = Turns(), threading.Event()
    for turn in (1, 1, 2, 3):
        turns.enter(turn)
    assert blocked(turns, 3, third)
    turns.leave(1)
    assert not third.wait(0.2)  # one each of rounds 1 and 2
    turns.leave(2)
    assert third.wait(10)
    assert SLACK == 1


def test_messages_of_one_round_and_of_later_ones_hold_nobody_up() -> None:
    turns = Turns()
    for turn in (2, 2, 2, 3, 3):
        turns.enter(turn)
    assert not blocked(turns, 2, threading.Event())
