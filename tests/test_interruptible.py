"""Ctrl-C in commands that save what they have done."""

import signal

import pytest

from common.interruptible import interruptible


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
