"""Signals in commands that save what they have done, and processes that are killed."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

import pytest

from common.interruptible import KilledError, heard_alone, in_processes, interruptible
from common.training.signals import SIGNALS
from tests.waiting import wait_for


def killed_at(wanted: int, number: int) -> int:
    """The number; the process dies as if memory were short if it is the wanted one."""
    if number == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_process_that_is_killed_ends_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @interruptible
    def main(argv: Sequence[str]) -> int:
        assert list(in_processes(killed_at, [(-1, 1), (-1, 2)], 1, 4, "jobs")) == [1, 2]
        list(in_processes(killed_at, [(3, number) for number in range(9)], 1, 4, "jobs"))
        return 0

    assert main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: jobs: one of the processes was killed, probably for lack of memory; ")


def test_nothing_of_a_pool_is_left_when_it_ends_early() -> None:
    """A thread that is left would end with the program, and write a traceback if that comes in between."""
    before = set(threading.enumerate())
    results = in_processes(time.sleep, [(0.0,), (60.0,)], 1, 4, "jobs")
    next(results)
    results.close()
    assert set(threading.enumerate()) == before


def test_fairseqs_processes_too() -> None:
    fairseq_compat = pytest.importorskip("transformer.fairseq_compat", exc_type=ImportError)
    results = []
    for wanted in (9, 2):
        pool = fairseq_compat.fairseq.binarizer.Pool(processes=1)
        results = [pool.apply_async(killed_at, args=(wanted,), kwds={"number": number}) for number in range(3)]
        pool.close()
        if wanted == 2:
            with pytest.raises(KilledError):
                pool.join()
        else:
            pool.join()
            assert [result.get() for result in results] == [0, 1, 2]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_a_command_and_further_ones_are_ignored(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    @interruptible
    def main(done: list[str]) -> int:
        try:
            signal.raise_signal(number)
            return 0
        finally:
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            done.append("saved")

    done: list[str] = []
    assert main(done) == 128 + number
    assert done == ["saved"]
    assert capsys.readouterr().err == "interrupted\n"


def test_after_a_command_signals_have_their_former_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert interruptible(lambda _: 3)([]) == 3
    assert [signal.getsignal(number) for number in SIGNALS] == before


def signalled(number: int) -> int:
    for each in SIGNALS:
        os.kill(os.getpid(), each)
    return number


def test_processes_of_a_command_do_not_hear_what_slurm_sends_to_all() -> None:
    assert list(in_processes(signalled, [(1,), (2,)], 2, 4, "jobs")) == [1, 2]


@pytest.mark.parametrize("number", SIGNALS)
def test_what_training_starts_does_not_hear_the_signal_that_asks_it_to_save(number: signal.Signals) -> None:
    came: list[int] = []
    former = signal.signal(number, lambda *_: came.append(number))
    try:
        with heard_alone():
            compiler = subprocess.Popen(["sleep", "60"])
            for process in (compiler.pid, os.getpid()):
                os.kill(process, number)
            wait_for(lambda: came)
            assert came == [number]
            assert compiler.poll() is None
        compiler.kill()
        assert compiler.wait() == -signal.SIGKILL
        os.kill(os.getpid(), number)
        assert came == [number, number]
    finally:
        signal.signal(number, former)
