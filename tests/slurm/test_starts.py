"""One job at a time, and none that gets nowhere."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.record import FAILED, INTERRUPTED
from slurm import starts
from slurm.allocation import JobError
from slurm.starts import begin, last_job, newest_step, read
from tests.slurm.fakes import attempt, started
from tests.waiting import LIMIT_S


def start(run: Path, job: str = "7") -> Path:
    return begin(run, job, "node1", lambda line: None)


@pytest.mark.parametrize(
    ("job", "end", "answer", "refused"),
    [
        ("6", None, "6 RUNNING", True),
        ("6", None, "5 RUNNING\n6 SUSPENDED", True),  # of an array, whose id is that of its last element
        ("6", None, "5 RUNNING", False),
        ("6", None, "", False),
        ("6", "stopped", "6 RUNNING", True),  # its ranks are still saving
        ("6", "failed", "6 RUNNING", False),  # it notes its end last of all
        ("7", None, "7 RUNNING", False),  # its own earlier start
    ],
)
def test_a_run_is_trained_by_one_job_at_a_time(tmp_path: Path, program, job, end, answer, refused) -> None:
    program("squeue", answer)
    started(tmp_path, job, end)
    if refused:
        with pytest.raises(JobError, match="job 6 is training it now"):
            start(tmp_path)
    else:
        assert start(tmp_path).name == "0002.json"
        assert last_job(tmp_path) == "7"


@pytest.mark.parametrize(("answer", "fails"), [("6 COMPLETING", False), ("slurm_load_jobs error: timed out", True)])
def test_a_job_that_does_not_end_is_waited_for_but_not_for_ever(
    tmp_path: Path, program, monkeypatch: pytest.MonkeyPatch, answer: str, fails: bool
) -> None:
    monkeypatch.setattr(starts, "PATIENCE_S", 0.3)
    monkeypatch.setattr(starts, "RETRY_S", 0.1)
    program("squeue", answer, fails)
    started(tmp_path, "6")
    lines: list[str] = []
    with pytest.raises(JobError, match=r"waited 0 s for job 6: (completing|unknown);"):
        begin(tmp_path, "7", "node1", lines.append)
    assert lines[0].startswith("waiting for job 6: ")


def test_of_jobs_that_begin_together_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "state_of", lambda job: "RUNNING")
    monkeypatch.setattr(starts, "RETRY_S", 0.1)
    together = threading.Barrier(8)

    def job(number: int) -> str:
        together.wait(timeout=LIMIT_S)
        try:
            return start(tmp_path, str(number)).name
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(job, range(8)))
    winner = last_job(tmp_path)
    assert sorted(outcomes) == ["0001.json", *[f"run_dir={tmp_path}: job {winner} is training it now"] * 7]


@pytest.mark.parametrize("end", [None, "failed", "saved", "node failure"])
def test_a_job_that_gets_nowhere_stops(tmp_path: Path, program, end: str | None) -> None:
    program("squeue", "")

    def begin_and_end(job: str = "7") -> None:
        file = start(tmp_path, job)
        if end is not None:
            starts.end(file, end)

    begin_and_end()
    begin_and_end()
    with pytest.raises(JobError, match="job 7 began 2 times at step 0"):
        start(tmp_path)
    begin_and_end(job="8")  # somebody submits it again: that job may try, too
    checkpoint = tmp_path / "checkpoints" / "step_00000120"
    checkpoint.mkdir(parents=True)
    assert newest_step(tmp_path) == 0  # it has no manifest: not complete
    (checkpoint / "manifest.json").write_text("{}")
    assert newest_step(tmp_path) == 120
    begin_and_end()  # it got further
    begin_and_end()
    with pytest.raises(JobError, match="began 2 times at step 120"):
        start(tmp_path)
    expected = [("7", 0), ("7", 0), ("8", 0), ("7", 120), ("7", 120)]
    assert [(one.job, one.step, one.end) for one in read(tmp_path)] == [(*pair, end) for pair in expected]


def test_preemption_is_not_the_jobs_fault(tmp_path: Path) -> None:
    for number in range(1, 6):
        file = start(tmp_path)
        assert file.name == f"000{number}.json"
        starts.end(file, "stopped")
    start(tmp_path)
    start(tmp_path)
    with pytest.raises(JobError, match="began 2 times at step 0"):
        start(tmp_path)


SRUN = """#!/bin/sh
case "$*" in *--overlap*) echo asked >>"$ASKED"; [ -e "$ANSWERS" ]; exit;; esac
echo "the reason"; echo "$WORDS"; exit 3
"""


@pytest.mark.parametrize(
    ("answers", "words", "told", "code", "end", "asked"),
    [
        (True, "", "failed: srun ended with exit code 3", FAILED, "failed", 1),
        (False, "", "a node does not answer", FAILED, "failed", 2),  # and Slurm does not notice
        (False, "srun: error: Node failure on node2", "node failure at step 0; after", INTERRUPTED, "node failure", 2),
    ],
)
def test_a_job_stays_until_slurm_has_noticed_a_lost_node(
    tmp_path: Path, program, monkeypatch: pytest.MonkeyPatch, answers, words, told, code, end, asked
) -> None:
    """Slurm requeues no job that has ended."""
    program("srun", SRUN, raw=True)
    program("scontrol", "SlurmdTimeout           = 300 sec")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("ANSWERS", str(tmp_path / "answers"))
    monkeypatch.setenv("WORDS", words)
    monkeypatch.setattr("slurm.job.REMIND_S", 0.1)
    monkeypatch.setattr("slurm.job.signal.signal", lambda *_: None)
    clock = iter(range(0, 10000, 200))
    monkeypatch.setattr("slurm.job.time.monotonic", lambda: next(clock))
    if answers:
        (tmp_path / "answers").touch()
    run = tmp_path / "run"
    run.mkdir()
    with (tmp_path / "log").open("ab", buffering=0) as log:
        assert attempt("cnn", [], run, log).run() == code
    text = (tmp_path / "log").read_text()
    assert "the reason" in text
    assert told in text
    assert read(run)[-1].end == end
    assert len((tmp_path / "asked").read_text().splitlines()) == asked


def test_a_job_that_is_stopped_says_so_before_its_ranks_have_saved(tmp_path: Path, program, monkeypatch) -> None:
    """They may take longer than Slurm waits."""
    file = tmp_path / "slurm" / "starts" / "0001.json"
    steps = (
        f"trap '' USR1; for k in $(seq 99); do grep -q stopped {file} && exit 0; sleep 0.1; done; touch {tmp_path}/late"
    )
    program("srun", f"#!/bin/sh\n{steps}\n", raw=True)
    monkeypatch.setattr("slurm.job.REMIND_S", 0.1)
    monkeypatch.setattr("slurm.job.signal.signal", lambda *_: None)
    with (tmp_path / "log").open("ab", buffering=0) as log:
        start = attempt("cnn", [], tmp_path, log)
        start._stop(15, None)
        assert start.run() == INTERRUPTED
    assert not (tmp_path / "late").exists()


class Full:
    """A file on a full disk."""

    def write(self, line: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_does_not_stop_the_reader_of_srun(tmp_path: Path, capfdbinary) -> None:
    attempt("cnn", [], tmp_path, Full())._copy([b"one\n", b"two\n"])
    assert capfdbinary.readouterr().out == b"one\ntwo\n"
