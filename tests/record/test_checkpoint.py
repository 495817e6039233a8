"""Checkpoints as files: memory while they are written and read, the order in which a run takes its state over."""

import errno
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.atomic import Hashing, describe, write_atomically
from common.launch.compose import compose_config
from common.record import FOLDERS
from common.record.checkpoint import Checkpoint, CheckpointError, Checkpoints
from common.record.run_folder import EARLIER_BOOKKEEPING, checkpoints_of, fingerprint
from common.training.worker_group import WorkerGroup

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MEGABYTES = 40


def peak_mb() -> float:
    """Return the largest resident memory since `forget_peak`."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1000


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """A checkpoint of 40 MB at step 3."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", "mine", keep=2)
    state = {"vector": torch.arange(MEGABYTES * 250_000, dtype=torch.float32), "steps": [torch.tensor(7.0)], "n": 3}
    torch.save(state, io.BytesIO())  # what the first one imports
    before = forget_peak()
    checkpoints.save(3, state, 0)
    checkpoints.save_model("last.pt", state)
    assert peak_mb() - before < MEGABYTES / 2
    return checkpoints


def test_no_copy_of_the_state_is_made_while_it_is_saved_or_mapped(saved: Checkpoints, tmp_path: Path) -> None:
    saved.load(GPU, print)  # with what the first one imports
    before = forget_peak()
    manifest, state = saved.load(GPU, print)
    assert peak_mb() - before < MEGABYTES / 2
    assert manifest.step == 3
    assert (state["vector"][-1], state["steps"], state["n"]) == (MEGABYTES * 250_000 - 1, [torch.tensor(7.0)], 3)
    file = tmp_path / "checkpoints" / "step_00000003" / "rank_0.pt"
    content = file.read_bytes()
    expected = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest.files == {"rank_0.pt": expected}
    assert describe(file) == expected
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_a_run_keeps_of_the_state_does_not_hold_the_file(device: torch.device, saved: Checkpoints) -> None:
    _, state = saved.load(device, print)
    assert {tensor.device for tensor in (state["vector"], *state["steps"])} == {CPU}
    kept = state["vector"] if device == CPU else state["steps"]
    del state
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "rank_0.pt" in line], kept


@pytest.mark.parametrize("bookkeeping", EARLIER_BOOKKEEPING)
def test_a_checkpoint_of_an_earlier_version_is_the_runs_own(bookkeeping: re.Pattern[str], tmp_path: Path) -> None:
    config = compose_config("cnn", [f"run_dir={tmp_path}"])
    earlier = fingerprint(config, bookkeeping)
    assert earlier != fingerprint(config)
    Checkpoints(tmp_path / "checkpoints", earlier, 1).save(3, {}, 0)
    assert checkpoints_of(config).load(CPU, print)[0].step == 3


def test_a_checkpoint_of_an_earlier_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    manifest = {"format": 1, "step": 1, "fingerprint": "mine", "metrics_bytes": 0, "files": {}}
    write_atomically(folder / "manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json has format 1, expected 3"):
        Checkpoints(tmp_path, "mine", 2).load(CPU, print)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(stream: object) -> None:
        stream.write(b"half")
        raise OSError("disk full")

    file = tmp_path / "last.pt"
    write_atomically(file, b"old")
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, fail)
    assert file.read_bytes() == b"old"
    assert [f.name for f in tmp_path.iterdir()] == ["last.pt"]


def test_a_full_disk_is_named_where_torch_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Hashing, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Hashing, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*last\.pt'"):
        Checkpoints(tmp_path, "mine", keep=1).save_model("last.pt", STATE)


def test_processes_that_write_the_same_file_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "last.pt"

    def write(stream: Hashing) -> None:
        stream.write(b"one")
        write_atomically(file, b"other")

    assert write_atomically(file, write) == describe(file)
    assert file.read_bytes() == b"one"


STATE = {"a": torch.ones(3), "members": [0]}


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(file.parent.name.removeprefix("step_")) for file in folder.glob(f"{FOLDERS}/manifest.json"))


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_saved_stays_and_what_is_damaged_goes(keep: int, tmp_path: Path) -> None:
    before = Checkpoints(tmp_path, "mine", keep=9)
    for step in (50, 100, 200, 300):
        before.save(step, STATE, 0)
    shutil.copytree(tmp_path / "step_00000300", tmp_path / "step_00000300 copy")
    for step in (200, 300):
        (tmp_path / f"step_{step:08d}" / "rank_0.pt").write_bytes(b"damaged")
    (tmp_path / "step_00000400").mkdir()
    (tmp_path / "step_00000400" / "rank_0.pt").write_bytes(b"half")  # not finished: without a manifest
    checkpoints = Checkpoints(tmp_path, "mine", keep)
    assert checkpoints.load(CPU, print).manifest.step == 100
    assert saved_steps(tmp_path) == [50, 100]
    checkpoints.save(150, STATE, 0)
    assert saved_steps(tmp_path) == [100, 150][-keep:]
    assert checkpoints.load(CPU, print).manifest.step == 150
    assert (tmp_path / "step_00000300 copy" / "rank_0.pt").exists()  # a user's, which is no checkpoint


def test_nothing_is_deleted_for_a_checkpoint_of_another_configuration(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "other", keep=1).save(300, STATE, 0)
    checkpoints = Checkpoints(tmp_path, "mine", keep=1)
    for step in (100, 200):
        checkpoints.save(step, STATE, 0)
        assert saved_steps(tmp_path) == [step, 300]
        assert checkpoints.load(CPU, print).manifest.step == step
    assert Checkpoints(tmp_path, "newer", keep=1, also=["mine"]).load(CPU, print).manifest.step == 200


def test_what_killed_processes_left_is_removed_at_the_next_save(tmp_path: Path) -> None:
    for name in (
        "step_00000010/rank_0.pt",
        "step_00000020/.rank_0.pt.7-a.tmp",
        ".last.pt.7-a.tmp",
        "models/.x.7-a.tmp",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    Checkpoints(tmp_path, "mine", keep=2).save(20, STATE, 0)
    left = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert left == ["step_00000020/manifest.json", "step_00000020/rank_0.pt"]


def test_a_checkpoint_of_the_same_step_counts_until_the_new_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, "mine", keep=1)
    checkpoints.save(3, STATE | {"n": 0}, 0)
    for n in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr("common.record.checkpoint.asdict", lambda _: 1 / 0)  # when all ranks have written
            with pytest.raises(ZeroDivisionError):
                checkpoints.save(3, STATE | {"n": n}, 0)
        assert checkpoints.load(CPU, print).state["n"] == n - 1
        checkpoints.save(3, STATE | {"n": n}, 0)
        assert checkpoints.load(CPU, print).state["n"] == n
        assert checkpoints.members() == (0,)
        assert len([*(tmp_path / "step_00000003").iterdir()]) == 2


def test_files_that_cannot_be_removed_do_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps files that some process has open under other names."""
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    (folder / ".nfs0001").write_bytes(b"open")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    checkpoints = Checkpoints(tmp_path, "mine", keep=1)
    for step in (3, 4):
        checkpoints.save(step, STATE, 0)
        assert checkpoints.load(CPU, print).manifest.step == step


def test_the_model_of_the_last_evaluation_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "mine", keep=1)
    for step in (100, 200, 300, 150):  # resumed from an older checkpoint
        checkpoints.keep_model(step, STATE, keep=2)
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == ["step_00000150.pt"]


def group_of(recorder: SimpleNamespace, checkpoints: SimpleNamespace, rank: int, **own: object) -> WorkerGroup:
    config = SimpleNamespace(evaluation=SimpleNamespace(models_kept=0))
    task = SimpleNamespace(before_evaluation=lambda step: None)
    known = {"task": task, "config": config, "device": CPU, "rank": rank, "tell": lambda _: None}
    group = WorkerGroup.__new__(WorkerGroup)
    vars(group).update(run=SimpleNamespace(**known, recorder=recorder, checkpoints=checkpoints), **own)
    return group


@pytest.mark.parametrize("settles", [True, False])
def test_a_resumed_run_rehearses_first_and_loads_once(settles: bool) -> None:
    calls: list[str] = []

    def note(what: str) -> object:
        return lambda *_, **__: calls.append(what)

    worker = SimpleNamespace(
        model=SimpleNamespace(settles_in_first_backward=settles),
        optimizer=SimpleNamespace(zero_grad=note("zero_grad")),
        load_state_dict=note("worker"),
    )
    found = Checkpoint(SimpleNamespace(step=4, metrics_bytes=0), {"workers": [{}], "recorder": {}})
    own = {"workers": [worker], "backward": note("rehearsal")}
    recorder = SimpleNamespace(folder=None, load_state_dict=note("record"))
    group_of(recorder, SimpleNamespace(), 1, **own).resume(found)
    assert calls == [*(["rehearsal", "zero_grad"] if settles else []), "worker", "record"]


@pytest.mark.parametrize("best", [True, False])
def test_others_wait_while_rank_0_writes_the_best_model(best: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("common.training.worker_group.gather_objects", lambda _: calls.append("wait"))
    noise = SimpleNamespace(after_evaluation=lambda *_: {})
    recorder = SimpleNamespace(clock=1, validation=lambda _: best, begin_step=lambda: None, noise=noise)
    checkpoints = SimpleNamespace(save_model=lambda name, _: calls.append(name))
    for rank in range(2):
        evaluator = SimpleNamespace(evaluate=lambda then: then({}, torch.nn.Linear(1, 1)))
        workers = [SimpleNamespace(model=SimpleNamespace(check_peers=lambda: None))]
        group_of(recorder, checkpoints, rank, _evaluator=evaluator, workers=workers).evaluate()
    assert calls == (["best.pt", "wait", "wait"] if best else [])
