"""Ctrl-C in commands that save what they have done, and processes that are killed."""

import os
import signal
from collections.abc import Sequence

import pytest

from common.interruptible import KilledError, in_processes, interruptible


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


def test_the_first_ctrl_c_ends_a_command_and_further_ones_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    @interruptible
    def main(done: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
            return 0
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("saved")

    done: list[str] = []
    assert main(done) == 130
    assert done == ["saved"]
    assert capsys.readouterr().err == "interrupted\n"


def test_after_a_command_ctrl_c_is_pythons_again() -> None:
    assert interruptible(lambda _: 3)([]) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
