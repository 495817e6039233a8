"""Loops that take turns: their steps alternate, none runs beside the other, and each one's steps are timed."""

import itertools
import threading
import time

import pytest

from scripts.benchmarks.interleaved_steps import UNTIMED, InterleavedSteps, run_interleaved


def run_both(steps: InterleavedSteps, first, second) -> None:
    def leaving(loop) -> None:
        loop()
        steps.leave()

    threads = [threading.Thread(target=leaving, args=(loop,)) for loop in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()


def test_steps_alternate_and_the_longer_loop_goes_on_alone() -> None:
    both, seen = InterleavedSteps(), []

    def loop(number: int, steps: int):
        def run() -> None:
            for _ in range(steps):
                both.boundary(number)
                seen.append(("begin", number))
                time.sleep(0.001)
                seen.append(("end", number))

        return run

    run_both(both, loop(0, 30), loop(1, 20))
    assert len(seen) == 2 * (30 + 20)
    for begin, end in zip(seen[::2], seen[1::2], strict=True):
        assert begin == ("begin", end[1])  # nobody else in between
        assert end[0] == "end"
    order = [number for what, number in seen if what == "begin"]
    assert all(a != b for a, b in itertools.pairwise(order[:39]))
    assert [len(times) for times in both.times] == [29, 19]


def test_compares_the_steps_that_lie_beside_each_other() -> None:
    steps = InterleavedSteps()
    steps.times[0][:] = [9.0] * UNTIMED + [2.0, 4.0, 6.0]
    steps.times[1][:] = [1.0] * UNTIMED + [1.0, 2.0, 2.0, 50.0]
    assert steps.compare() == (4.0, 2.0, 2.0)


def test_a_failing_bare_loop_is_an_error(tmp_path) -> None:
    def bare(boundary) -> None:
        boundary()
        raise ValueError("it broke")

    few = ["training.steps=2", "model.width=2", "logging.progress=false", f"run_dir={tmp_path}/run"]
    with pytest.raises(RuntimeError, match=r"cnn .*training\.steps=2") as caught:
        run_interleaved("cnn", few, bare)
    assert str(caught.value.__cause__) == "it broke"
