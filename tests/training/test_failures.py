"""Signals, errors and killed processes of runs from the command line: exit codes, messages, no process left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.launch.processes import launch
from common.launch.rank import leave_process_group
from tests.training.faulty.task import MARK
from tests.training.runs import RUN, Ranks, rows, summary
from tests.waiting import LIMIT_S, processes_in, wait_for

PLAIN = [sys.executable, "-m", "cnn.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "cnn.train"]
FAULTY = ["task=tests.training.faulty"]


def begin(command: list[str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run of two workers in a new session."""
    count = [] if command is TORCHRUN else ["workers.count=2"]
    return subprocess.Popen(
        [*command, *RUN, *count, f"run_dir={folder}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the run and return its output. None of its processes may be alive a little later."""
    output, _ = process.communicate(timeout=LIMIT_S)
    wait_for(lambda: not processes_in(process.pid), limit_s=30.0)
    return output


def started(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 1


LONG = ["training.steps=300", "training.checkpoint_every=100", "evaluation.every=100"]


@pytest.mark.slow
def test_a_signal_to_the_launcher_or_to_everybody_saves_and_stops(tmp_path: Path) -> None:
    """Every time that the run goes on."""
    folder, steps, rows_before = tmp_path / "run", 0, 0
    for number, everyone in ((signal.SIGINT, False), (signal.SIGTERM, True)):  # a terminal, Slurm
        process = begin(PLAIN, folder, *LONG)
        wait_for(lambda seen=rows_before: started(folder) and len(rows(folder)) > seen)
        for pid in processes_in(process.pid) if everyone else [process.pid]:
            os.kill(pid, number)
        output = end(process)
        assert "Traceback" not in output
        assert (process.returncode, summary(folder)["status"]) == (75, "interrupted"), output
        assert steps < summary(folder)["steps"] < 300
        steps, rows_before = summary(folder)["steps"], len(rows(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lingers", "hears"])
def test_a_signal_in_the_last_evaluation_comes_too_late(name: str, tmp_path: Path) -> None:
    """To the launcher, or to one worker."""
    process = begin(PLAIN, tmp_path / "run", *FAULTY, f"name={name}", "training.steps=6", "evaluation.every=6")
    wait_for((tmp_path / "run" / MARK).exists)
    if name == "lingers":
        process.send_signal(signal.SIGINT)
    output = end(process)
    assert (process.returncode, summary(tmp_path / "run")["status"]) == (0, "finished"), output


@pytest.mark.slow
def test_where_a_terminal_closes_a_logging_service_that_has_ended_is_named_in_a_line(tmp_path: Path) -> None:
    """The process of wandb, which hears the signal, too, and ends perhaps before the run has saved."""
    process = begin([*PLAIN, "workers=simulated", "logging.wandb=offline"], tmp_path / "run", *LONG)
    wait_for(lambda: started(tmp_path / "run"))
    children = " ".join(file.read_text() for file in Path(f"/proc/{process.pid}/task").glob("*/children")).split()
    (service,) = [pid for pid in children if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]
    for pid, number in ((service, signal.SIGKILL), (process.pid, signal.SIGHUP)):
        os.kill(int(pid), number)
    output = end(process)
    assert (process.returncode, summary(tmp_path / "run")["status"]) == (75, "interrupted"), output
    assert output.count("wandb failed and is disabled from now on") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_run_and_is_shown_first(tmp_path: Path) -> None:
    """Although closing the process group blocks, as with NCCL, whose kernels wait for peers."""
    process = begin(TORCHRUN, tmp_path / "run", *FAULTY, "name=raises", "parallel.timeout_s=20")
    output = end(process)
    assert process.returncode == 1
    failures = [line for line in output.splitlines() if line.startswith("rank ") and line.endswith(" failed:")]
    assert failures[0] == "rank 1 failed:"
    first = output.split("rank 0 failed:")[0]
    assert re.search(r"ValueError: this rank is broken\nafter step \d+\n", first)


def said_by_rank_0(runs: dict[str, list[str]], folder: Path) -> dict[str, str]:
    """Start these runs of two ranks at once, as they mostly wait; return what rank 0 says of rank 1, which fails."""
    starts = {
        name: Ranks([*RUN, *arguments, "parallel.timeout_s=3", f"run_dir={folder}/{name}"], 2, folder / name.upper())
        for name, arguments in runs.items()
    }
    try:
        for name, ranks in starts.items():
            ranks.processes[0].join(300)
            assert ranks.processes[0].exitcode == 1, name
        return {name: (folder / f"{name.upper()}.0").read_text() for name in runs}
    finally:
        for ranks in starts.values():
            ranks.signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_hangs_between_messages_is_found_in_time(tmp_path: Path) -> None:
    """With rounds of 1000 steps, ranks meet only where they record losses and agree on whether to stop."""
    local = [*FAULTY, "name=hangs", "parallel=local_sgd", "parallel.local_steps=1000"]
    local += ["evaluation.every=1000", "training.steps=1000", "training.checkpoint_every=1000"]
    runs = {"row": [*local, "logging.every=1"], "agreement": [*local, "logging.every=1000"]}
    for said in said_by_rank_0(runs, tmp_path).values():
        assert "all 2 ranks must take part" in said
        assert re.search(r"after step \d+\n", said)


@pytest.mark.slow
def test_a_rank_that_is_stopped_anywhere_ends_the_run(tmp_path: Path) -> None:
    """Also where others are patient with it, as it may prepare data or write a model."""
    places = ("data", "validation", "end")
    runs = {place: [*FAULTY, f"name={place}"] for place in places}
    for place, said in said_by_rank_0(runs, tmp_path).items():
        assert "rank 0: rank 1 has had no heartbeat for 13 s" in said or "rank 0 failed:" in said, (place, said)


@pytest.mark.parametrize(("code", "ranks", "leaves"), [(0, 2, False), (75, 2, False), (1, 1, False), (1, 2, True)])
def test_only_a_failure_among_several_ranks_ends_the_process(
    code: int, ranks: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr("os._exit", calls.append)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: calls.append("closed"))
    leave_process_group(code)
    assert calls == [code if leaves else "closed"]


def test_a_run_that_stopped_at_a_loss_that_is_not_finite_can_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = [*RUN, "workers=simulated", "workers.count=2", "optimizer=sgd", "optimizer.lr=1e30"]
    run.append(f"run_dir={tmp_path}/run")
    assert launch("cnn", run) == 1
    assert re.search(r"training loss nan at step \d+ on worker", capfd.readouterr().err)
    assert summary(tmp_path / "run")["status"] == "failed"
    assert launch("cnn", [*run, "training.on_nan=warn", "parallel.timeout_s=77"]) == 0
    assert "warning: training loss nan at step" in capfd.readouterr().err
    assert summary(tmp_path / "run")["status"] == "finished"
