"""What is done before workers start, and how: refusals, who speaks, signals, names and numbers of the environment."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.config import ConfigError
from common.launch import cli, rank
from common.launch import processes as launch
from common.launch.compose import compose_config
from common.training.device import threads_per_process
from common.training.signals import SIGNALS

TWO = ["workers.count=2", "training.batch_size=8", "schedule.warmup=0"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """Do nothing where local workers would be started; their launchers' configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "elastic_launch", lambda config, _: lambda *args: found.append(config))
    found: list = []
    return found


def test_local_workers_need_neither_the_hosts_name_nor_a_short_tmpdir(
    started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened: list[bool] = []
    monkeypatch.setattr("common.interruptible.shorten_socket_paths", lambda: shortened.append(True))
    assert launch.launch("cnn", TWO) == 0
    (config,) = started
    assert config.local_addr == "localhost"
    for option, seconds in launch.shutdown_timeout(600).items():
        assert getattr(config, option) >= seconds
    assert shortened == [True]


def test_sockets_lie_elsewhere_if_tmpdir_is_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    program = (
        "from multiprocessing.connection import arbitrary_address\n"
        "from common.interruptible import shorten_socket_paths\n"
        "shorten_socket_paths(); print(arbitrary_address('AF_UNIX'), __import__('tempfile').gettempdir())"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"TMPDIR": str(long)}
    address, folder = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode().split()
    assert len(address) <= 107
    assert folder == str(long)


@pytest.mark.parametrize("task", ["cnn", "gpt2", "transformer"])
def test_missing_data_start_no_worker(task: str, started: list, tmp_path: Path, capsys) -> None:
    data = {
        "cnn": ["data=imagenet", "model=resnet50"],
        "gpt2": ["data=tokens", "data.folder=nowhere"],
        "transformer": ["data=wmt14_en_de"],
    }
    assert launch.launch(task, [*data[task], "workers.count=2"]) == 2
    assert capsys.readouterr().err.startswith("error: data.")
    assert not started
    assert list(tmp_path.iterdir()) == []


def test_workers_simulated_by_several_processes_are_refused(
    started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    simulated = ["workers=simulated", "workers.count=2"]
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        assert launch.launch("cnn", simulated) == 2
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    assert launch.launch("cnn", simulated) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: workers=simulated in 2 processes of a launcher: expected one, which simulates all"
    assert "in 3 processes" in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "under_torch", "alike", "waited", "spoken"),
    [
        ("0", True, True, [], "error: no"),
        ("", True, True, [], "error: no"),
        ("1", True, True, [15], "rank 1: error: no"),  # torch's launcher would have ended it, had rank 0 spoken
        ("1", False, True, [1], ""),
        ("1", False, False, [1], "rank 1: error: no"),  # perhaps an error of this rank alone
    ],
)
def test_rank_0_speaks(number, under_torch, alike, waited, spoken, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    slept: list[float] = []
    monkeypatch.setattr(rank.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", number)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torch:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert rank.refuse(ConfigError("no"), alike) == 2
    assert (slept, capsys.readouterr().err.strip()) == (waited, spoken)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_nothing_trains_is_no_failure(
    number: int, started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torch's launcher runs already, which passes it on, or not yet, and though an earlier start failed."""

    def stopped(*_: object) -> None:
        os.kill(os.getpid(), number)

    (tmp_path / "summary.json").write_text('{"status": "failed"}')
    monkeypatch.setattr(sys, "argv", ["cnn.train", *TWO, "resume=true", f"run_dir={tmp_path}"])
    former = [signal.getsignal(other) for other in SIGNALS]
    for name in ("elastic_launch", "check_start"):
        with monkeypatch.context() as patch:
            patch.setattr(launch, name, stopped)
            with pytest.raises(SystemExit) as end:
                cli.main("cnn")
        assert end.value.code == 75
        assert [signal.getsignal(other) for other in SIGNALS] == former


def test_under_nohup_a_closed_terminal_stays_ignored() -> None:
    program = (
        "import signal; from common.training.signals import SIGNALS, stopped_at_once\n"
        "with stopped_at_once(): signal.raise_signal(signal.SIGHUP)\n"
        "print([number.name for number in SIGNALS])"
    )
    command = ["nohup", sys.executable, "-c", program]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['SIGTERM', 'SIGINT', 'SIGUSR1']"


@pytest.mark.parametrize(
    ("value", "torchrun", "threads"),
    [("3", True, 3), ("1", False, 1), ("1", True, 6), ("", False, 6), ("0", False, 6), ("5,2", False, 5)],
)
def test_threads_are_those_of_the_environment(
    value: str, torchrun: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:  # which sets 1 where the user has set nothing
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert threads_per_process(distributed=True) == threads


@pytest.mark.parametrize("threads", ["1025", "9" * 5000])
def test_more_threads_than_a_machine_has_are_refused(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS={threads} in the environment: expected at most 1024"):
        threads_per_process(distributed=False)


def test_numbers_of_a_launcher_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert compose_config("cnn", ["workers.count=3", "training.batch_size=9"]).n == 3
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE=two in the environment: expected a number"):
        compose_config("cnn", [])
