"""One process at a time holds a run folder, whatever became of the one before."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.record import run_lock
from common.record.run_folder import RunFolder
from common.record.run_lock import Holder, RunLock
from tests.waiting import wait_for


def holder(**facts: object) -> Holder:
    """Return this process as a holder, but for these facts."""
    folder = Path(os.devnull)
    return RunLock(folder, "earlier")._mine._replace(**facts)


def write(file: Path, content: Holder) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content._asdict()))


@pytest.fixture
def dead() -> Holder:
    """A process of this host that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return holder(id="dead", pid=ended.pid, began="1")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Holder:
    """A process of another host; it may be silent for a moment only."""
    monkeypatch.setattr(run_lock, "SILENCE_S", 0.4)
    monkeypatch.setattr(run_lock, "LOOK_S", 0.02)
    return holder(id="elsewhere", host="far", place="another kernel", pid=7)


def test_a_second_one_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    first, second = (RunLock(tmp_path / "run", start) for start in ("one", "other"))
    first.take()
    with pytest.raises(ConfigError, match=rf"run_dir={tmp_path}/run: process {os.getpid()} on \S+ .* trains in it"):
        second.take()
    first.release()
    assert not (tmp_path / "run").exists()  # it held nothing else
    second.take()
    second.release()


def test_processes_of_one_start_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.02)
    launcher, worker, other = (RunLock(tmp_path / "run", start) for start in ("one", "one", "other"))
    launcher.take()
    worker.take()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="has taken it over"):
        launcher.check()
    worker.check()
    launcher.release()  # it is the worker's
    with pytest.raises(ConfigError):
        other.take()
    worker.release()
    other.take()
    other.release()


@pytest.mark.parametrize("crash", [False, True], ids=["", "another was about to follow and died, too"])
def test_of_many_that_find_a_dead_process_one_follows(crash: bool, dead: Holder, tmp_path: Path) -> None:
    write(tmp_path / ".lock", dead)
    if crash:
        write(tmp_path / ".lock.after_dead", dead._replace(id="dead_too"))
    locks = [RunLock(tmp_path, str(number)) for number in range(16)]
    barrier = threading.Barrier(len(locks))

    def take(lock: RunLock) -> bool:
        barrier.wait()
        try:
            lock.take()
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(len(locks)) as pool:
        (winner,) = itertools.compress(locks, pool.map(take, locks))
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    assert json.loads((tmp_path / ".lock").read_text())["start"] == winner.start
    winner.release()
    assert not [*tmp_path.iterdir()]


def test_who_looked_too_early_does_not_follow(dead: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds a dead process; before it acts, another one takes the lock and goes on to train."""
    late, other = RunLock(tmp_path, "late"), RunLock(tmp_path, "other")
    write(tmp_path / ".lock", dead)
    start_time = run_lock._start_time

    def slow(pid: int) -> str | None:
        found = start_time(pid)
        monkeypatch.setattr(run_lock, "_start_time", start_time)
        other.take()
        return found

    monkeypatch.setattr(run_lock, "_start_time", slow)
    with pytest.raises(ConfigError, match="trains in it"):
        late.take()
    assert json.loads((tmp_path / ".lock").read_text())["start"] == "other"
    other.release()


def test_a_silent_process_elsewhere_loses_the_lock(elsewhere: Holder, tmp_path: Path) -> None:
    write(tmp_path / ".lock", elsewhere)
    lock = RunLock(tmp_path, "new")
    lock.take()
    lock.check()
    lock.release()


@pytest.mark.parametrize("ended", [False, True], ids=["which trains", "which has ended"])
def test_who_was_silent_leaves_the_folder_to_its_follower(
    ended: bool, elsewhere: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(compose_config("cnn", [f"run_dir={tmp_path}"]), [])
    write(tmp_path / ".lock", elsewhere)
    if ended:
        (tmp_path / ".lock").unlink()
    monkeypatch.setattr(run_lock, "SILENCE_S", -1.0)
    for act in (folder.append, folder.finish):
        with pytest.raises(RuntimeError, match="has taken it over"):
            act({"step": 1})
    folder.fail(ValueError())
    folder.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "summary.json").exists()


def test_a_process_that_is_hidden_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's, and /proc is mounted with hidepid."""
    write(tmp_path / ".lock", holder(id="hidden"))
    monkeypatch.setattr(run_lock, "_start_time", lambda pid: None)
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    with pytest.raises(ConfigError, match="trains in it"):
        RunLock(tmp_path, "new").take()


def test_a_process_elsewhere_that_gives_signs_keeps_it(elsewhere: Holder, tmp_path: Path) -> None:
    write(tmp_path / ".lock", elsewhere)
    threading.Timer(0.1, os.utime, [tmp_path / ".lock"]).start()
    with pytest.raises(ConfigError, match="process 7 on far"):
        RunLock(tmp_path, "new").take()


def test_the_holder_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.02)
    lock = RunLock(tmp_path, "one")
    lock.take()
    os.utime(tmp_path / ".lock", (0, 0))
    wait_for(lambda: (tmp_path / ".lock").stat().st_mtime > 0)
    (tmp_path / ".lock").unlink()  # by somebody who took it for a remainder
    wait_for((tmp_path / ".lock").exists)
    lock.check()
    lock.release()


def test_what_was_made_for_a_refused_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock(tmp_path / "runs/task/run", "one")
    with monkeypatch.context() as full_disk:
        full_disk.setattr(run_lock, "_content", lambda holder: Path("/dev/full").write_bytes(b"x"))
        with pytest.raises(ConfigError, match=r"cannot be written .No space left on device"):
            lock.take()
    assert not list(tmp_path.iterdir())
    lock.take()
    lock.release()
    assert not list(tmp_path.iterdir())
