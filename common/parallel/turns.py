"""Rounds take turns on the links between hosts."""

import threading
from collections import Counter

SLACK = 1  # messages of earlier rounds that may still be under way: the link never rests between two rounds


class Turns:
    """Holds messages of a round back until those of earlier rounds have arrived.

    A bucket's next round may begin while other buckets still wait for this one. Were both on the link at once, each
    would get half of it, and the earlier round, for which hosts wait, would end late: with alternating pairs of hosts
    every step then takes half as long again. Earlier rounds depend on no later ones, so nobody waits in a circle.

    Plain messages between two ranks do not take turns: while one waits for a late peer, its link can serve the next.
    """

    def __init__(self) -> None:
        self._under_way: Counter[int] = Counter()
        self._changed = threading.Condition()

    def enter(self, turn: int) -> None:
        """One message more of round `turn`: from now on later rounds wait for it."""
        with self._changed:
            self._under_way[turn] += 1

    def wait(self, turn: int) -> None:
        """Block until it is the turn of round `turn`: no more than SLACK messages of earlier rounds are under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._before(turn) <= SLACK)

    def leave(self, turn: int) -> None:
        """A message of round `turn` arrived, or failed."""
        with self._changed:
            self._under_way[turn] -= 1
            self._under_way += Counter()  # drops what is zero
            self._changed.notify_all()

    def _before(self, turn: int) -> int:
        return sum(count for other, count in self._under_way.items() if other < turn)
