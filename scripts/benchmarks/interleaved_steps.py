"""Two training loops in one process, a step of each in turn: what slows the machine down slows both alike."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from unittest import mock

from common.launch.processes import launch
from common.training.stream import Stream

UNTIMED = 10  # first steps of each loop: they allocate and warm up


class InterleavedSteps:
    """Two loops in two threads, one turn at a time: first one of loop 0, then one of loop 1.

    turn:   steps of a turn
    settle: called at the end of each turn, to wait for a GPU
    times:  seconds of a step, for each turn of each loop
    """

    def __init__(self, turn: int = 1, settle: Callable[[], None] = lambda: None) -> None:
        self.times: tuple[list[float], list[float]] = ([], [])
        self._steps, self._settle = turn, settle
        self._begun = [0, 0]
        self._since: list[float | None] = [None, None]
        self._turn, self._alone = 0, False
        self._changed = threading.Condition()

    def boundary(self, loop: int) -> None:
        """End one step of this loop and begin the next one; after a turn, once the other loop has had its turn too."""
        self._begun[loop] += 1
        if (self._begun[loop] - 1) % self._steps:
            return
        self._settle()
        now, since = time.perf_counter(), self._since[loop]
        if since is not None:
            self.times[loop].append((now - since) / self._steps)
        with self._changed:
            # The first to come waits for the other.
            self._turn = 1 - loop
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == loop or self._alone)
        self._since[loop] = time.perf_counter()

    def leave(self) -> None:
        """End a loop's part; the other one goes on alone."""
        with self._changed:
            self._alone = True
            self._changed.notify_all()

    def compare(self) -> tuple[float, float, float]:
        """Return the median steps of loops 0 and 1, and the median ratio of a step of 0 to the step of 1 beside it."""
        pairs = list(zip(*self.times, strict=False))[-(-UNTIMED // self._steps) :]
        ratio = statistics.median(first / second for first, second in pairs)
        return (*(statistics.median(values) for values in zip(*pairs, strict=True)), ratio)


def run_interleaved(
    task: str,
    overrides: Sequence[str],
    bare: Callable[[Callable[[], None]], None],
    turn: int = 1,
    settle: Callable[[], None] = lambda: None,
) -> InterleavedSteps:
    """Run `python -m <task>.train overrides` (loop 0) beside `bare` (loop 1), which calls its argument before a step.

    turn, settle: of InterleavedSteps

    Raises RuntimeError if one of them fails.
    """
    steps = InterleavedSteps(turn, settle)
    failures: list[BaseException] = []
    draw = Stream.__next__

    def our_step(stream: Stream) -> object:
        steps.boundary(0)
        return draw(stream)

    def other_loop() -> None:
        try:
            bare(lambda: steps.boundary(1))
        except BaseException as error:
            failures.append(error)
        finally:
            steps.leave()

    other = threading.Thread(target=other_loop, name="bare", daemon=True)
    with mock.patch.object(Stream, "__next__", our_step):
        other.start()
        try:
            code = launch(task, list(overrides))
        finally:
            steps.leave()
    other.join()
    if code or failures:
        raise RuntimeError(f"{task} {overrides} ended with exit code {code}") from (failures or [None])[0]
    return steps
