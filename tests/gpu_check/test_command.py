"""The command: its arguments, its table, and what becomes of a check that raises, dies or hangs."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.report.benchmark import read_record
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import record, suite
from scripts.gpu_check.outcome import FailedError, Machine, SkippedError
from scripts.gpu_check.processes import last_line, run_check, run_program, run_ranks

CPU = Machine("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check=1"], "check: unknown key"),
        (["checks=1,11"], "checks='1,11': expected numbers from 1 to 10, as checks=1,2,7"),
        (["checks=one"], "checks='one': expected numbers from 1 to 10, as checks=1,2,7"),
        (["device=tpu"], "device='tpu': expected 'cuda' or 'cpu'"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert command.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(("failure", "code"), [(None, 0), (FailedError("1 failed"), 1)])
def test_without_a_gpu_the_emulated_tests_decide(
    failure: FailedError | None, code: int, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_tests(paths: list[str], **_: object) -> str:
        assert "tests/cuda" in paths
        if failure is not None:
            raise failure
        return "3 passed"

    monkeypatch.setattr(suite, "run_tests", run_tests)
    assert command.main([f"output={tmp_path}"]) == code
    assert not list(tmp_path.iterdir())


def passing(machine: Machine) -> str:
    return f"{machine.ranks} ranks"


def failing(machine: Machine) -> str:
    raise FailedError("a figure is wrong")


def skipping(machine: Machine) -> str:
    raise SkippedError("needs 2 GPUs, found 1")


def broken(machine: Machine) -> str:
    raise KeyError("missing")


def dying(machine: Machine) -> str:
    os._exit(3)


def hanging(machine: Machine) -> str:
    time.sleep(600)
    return ""


def told_to_end(machine: Machine) -> str:
    """Be told to end once all ranks live."""
    threading.Thread(target=end_when_ranks_live, args=(machine.log,), daemon=True).start()
    run_ranks(hang_in_rank, 2, machine, machine.log)
    return ""


def end_when_ranks_live(log: str) -> None:
    while not all(pid_of(log, rank) for rank in range(2)):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def pid_of(log: str, rank: int) -> str:
    file = Path(f"{log}.{rank}")
    return file.read_text() if file.exists() else ""


def hang_in_rank(rank: int, n: int, machine: Machine, log: str) -> None:
    Path(f"{log}.{rank}").write_text(str(os.getpid()))
    time.sleep(600)


def test_the_command_prints_a_table_and_fails_if_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    outcomes = {1: ("passed", "4 ranks"), 2: ("failed", "a figure\nis wrong"), 3: ("skipped", "needs 2 GPUs, found 1")}
    by_function = {command.CHECKS[number].function: outcome for number, outcome in outcomes.items()}
    monkeypatch.setattr(command, "run_check", lambda function, *_: by_function[function])
    assert command.main(["device=cpu", "checks=3,1,2", f"output={tmp_path}"]) == 1
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:5] for line in printed.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in (row[0], row[2], row[3])] for row in rows] == [
        ["1", "passed", "4 ranks"],
        ["2", "failed", "a figure is wrong"],
        ["3", "skipped", "needs 2 GPUs, found 1"],
    ]
    assert not list(tmp_path.iterdir())  # a record is of GPUs
    assert command.main(["device=cpu", "checks=1,3", f"output={tmp_path}"]) == 0


def test_the_record_keeps_rows_of_other_checks(tmp_path: Path) -> None:
    for numbers, figure in ([(1, 2, 10), "old"], [(2,), "new"]):
        results = record.Record()
        for number in numbers:
            results.add(number, command.CHECKS[number].title, "passed", figure, 1.0)
        results.write(str(tmp_path), "python -m scripts.gpu_check")
    rows = record.read(tmp_path / "gpu_check.csv")
    assert [(row["number"], row["figure"]) for row in rows] == [(1, "old"), (2, "new"), (10, "old")]
    assert all(row["date"] and row["commit"] for row in rows)
    assert read_record(tmp_path / "gpu_check.md").title == "Checks on GPUs"


def test_the_line_that_tells_most() -> None:
    assert last_line("Traceback:\n  File x\nValueError: first line\nsecond line\n") == "ValueError: first line"
    assert last_line("the process died") == "the process died"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "limit_s", "outcome"),
    [
        (passing, 300, ("passed", "4 ranks")),
        (failing, 300, ("failed", "a figure is wrong")),
        (skipping, 300, ("skipped", "needs 2 GPUs, found 1")),
        (broken, 300, ("failed", "KeyError: 'missing'")),
        (dying, 300, ("failed", "its process ended with exit code 3")),
        (hanging, 2, ("failed", "no result after 2 s")),
    ],
)
def test_checks_live_apart(function: Callable[[Machine], str], limit_s: float, outcome: tuple[str, str]) -> None:
    assert run_check(function, CPU, limit_s) == outcome


@pytest.mark.slow
def test_ranks_end_with_their_check(tmp_path: Path) -> None:
    machine = Machine("cpu", log=str(tmp_path / "log"))
    assert run_check(told_to_end, machine, 300) == ("failed", "its process ended with exit code 1")
    deadline = time.monotonic() + 30
    for rank in range(2):
        pid = int(pid_of(machine.log, rank))
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(FailedError, match=r"still running after 0\.2 s"):
        run_program(["sleep", "600"], 0.2)
