"""A run that is killed at any moment and started again ends as an uninterrupted one, bit for bit."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from common.launch.processes import launch
from tests.training.runs import RUN, Ranks, assert_same_run, finish, forget, manifests, rows, summary
from tests.waiting import LIMIT_S, wait_for

ACCUMADAMW = ["optimizer=accumadamw", "optimizer.weight_decay=0.1", "optimizer.accumulation_steps=3"]
SETTINGS = {
    "allreduce": (3, ["parallel=allreduce", "optimizer=adamw", "training.batch_size=96"]),
    "aer": (4, ["topology=aer", "workers.per_host=2", "training.clip=1.0", *ACCUMADAMW]),
    "dmsgd": (2, ["topology=ring", "parallel.order=atc", "optimizer=dmsgd", "optimizer.lr=0.02"]),
    "local_steps": (
        3,
        [
            "training.batch_size=96",
            "parallel=gossip_diloco",
            "parallel.local_steps=5",
            "parallel.merge_after=3",
            "parallel.message_dtype=int8",
            "parallel.bucket_mb=0.002",
            *ACCUMADAMW,
        ],
    ),
    "sharded": (
        4,
        [
            *("workers.count=2", "parallel.ranks_per_worker=2", "parallel.shard=true", "training.batch_size=64"),
            *("evaluation.keep_average=true", "evaluation.recalibrate_batches=2", "training.gradient_accumulation=2"),
            *ACCUMADAMW,
        ],
    ),
    "simulated": (
        1,
        [
            *("workers=simulated", "workers.count=4", "workers.per_host=2"),
            *("parallel=noloco", "parallel.local_steps=5", "topology=aer", *ACCUMADAMW),
        ],
    ),
}


def start(setting: str, folder: Path, *more: str) -> Ranks:
    n, arguments = SETTINGS[setting]
    return Ranks([*RUN, *arguments, *more, f"run_dir={folder}"], n, folder.with_suffix(".log"))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Uninterrupted runs, made once for each setting, and their durations."""
    return {"folder": (tmp_path_factory.mktemp("references"), 0.0)}


def reference(references: dict[str, tuple[Path, float]], setting: str) -> tuple[Path, float]:
    if setting not in references:
        folder = references["folder"][0] / setting
        begin = time.monotonic()
        finish(start(setting, folder))
        references[setting] = folder, time.monotonic() - begin
    return references[setting]


KILLS_AGAIN = ("aer", "simulated")  # also where it has resumed; the others are killed once


@pytest.mark.slow
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "dmsgd"])  # that is damaged, below
def test_killed_at_any_moment(setting: str, references: dict, tmp_path: Path) -> None:
    expected, duration = reference(references, setting)
    moments = random.Random(setting)
    kills = runs = resumed = 0
    enough = 2 if setting in KILLS_AGAIN else 1
    while kills < enough or resumed == 0:
        folder = tmp_path / f"run_{runs}"
        begin, kills_before = time.monotonic(), kills
        while True:
            # Most are killed on the way, some at the end; after the last kill, one that can resume is left alone.
            last = kills >= enough and bool(manifests(folder))
            ranks = start(setting, folder)
            if ranks.wait(LIMIT_S if last else moments.uniform(0.2, 1) * duration):
                break
            ranks.signal(signal.SIGKILL)
            assert ranks.wait(LIMIT_S)
            kills += 1
        if kills == kills_before:  # the reference also started the server of processes, or had a busier machine
            duration = min(duration, time.monotonic() - begin)
        assert set(ranks.codes()) == {0}
        assert_same_run(folder, expected)
        resumed += folder.with_suffix(".log.0").read_text().count("resumed at step")
        runs += 1


def test_interrupted(references: dict, tmp_path: Path) -> None:
    expected, _ = reference(references, "dmsgd")
    for attempt in range(5):  # a run may end before the signal comes: then another one
        folder = tmp_path / f"run_{attempt}"
        ranks = start("dmsgd", folder)
        wait_for(lambda folder=folder: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 1)
        last = len(ranks.processes) - 1
        ranks.signal(signal.SIGUSR1, range(last, last + 1))  # one rank only: all must agree
        assert ranks.wait(LIMIT_S)
        if set(ranks.codes()) != {0}:
            break
    assert set(ranks.codes()) == {75}
    assert summary(folder)["status"] == "interrupted"
    finish(start("dmsgd", folder))
    assert_same_run(folder, expected)
    assert summary(folder)["status"] == "finished"


@pytest.mark.slow
def test_amid_a_round_the_mean_model_is_of_the_inner_parameters(references: dict) -> None:
    folder, _ = reference(references, "local_steps")  # 24 updates in rounds of 5
    last = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    files = sorted((folder / "checkpoints" / "step_00000024").glob("rank_*.pt"))
    workers = [torch.load(file, weights_only=True)["workers"][0] for file in files]
    for name, tensor in last.items():
        mean = torch.stack([worker["model"][name].double() for worker in workers]).mean(0)
        assert torch.allclose(tensor.double(), mean, rtol=0, atol=1e-6), name
    outer = torch.stack([worker["communication"]["anchor.0"].double() for worker in workers]).mean(0)
    inner = torch.cat(
        [tensor.double().flatten() for name, tensor in last.items() if name.endswith((".weight", ".bias"))]
    )
    assert (outer.norm() - inner.norm()).abs() > 1e-5  # padding between buckets is 0


def test_damaged_checkpoints_are_skipped_by_name(references: dict, tmp_path: Path) -> None:
    expected, _ = reference(references, "dmsgd")
    folder = tmp_path / "run"
    ranks = start("dmsgd", folder)
    wait_for(lambda: len(manifests(folder)) >= 2)
    ranks.signal(signal.SIGKILL)
    ranks.wait(LIMIT_S)
    newest, *_ = manifests(folder)
    file = newest.parent / "rank_1.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    finish(start("dmsgd", folder))
    log = folder.with_suffix(".log.0").read_text()
    assert f"{file} is damaged" in log
    assert f"resumed at step {int(newest.parent.name.removeprefix('step_'))}" not in log
    assert_same_run(folder, expected)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two simulated workers that kept one checkpoint."""
    folder = tmp_path_factory.mktemp("simulated") / "run"
    assert launch("cnn", [*SIMULATED, f"run_dir={folder}"]) == 0
    return folder


SIMULATED = [*RUN, "workers=simulated", "workers.count=2", "training.checkpoints_kept=1"]


DAMAGES = {
    "truncated": "rank_0.pt is damaged: size or sha256 are not those of manifest.json",
    "no manifest": "manifest.json is not a manifest",
    "foreign": "is foreign: it was written with another configuration",
    "missing": "rank_0.pt cannot be read (No such file or directory)",
    "no rows": "metrics.jsonl",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_usable_checkpoint_nothing_starts_afresh(
    damage: str, simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(simulated, tmp_path / "run")
    arguments = [*SIMULATED, f"run_dir={folder}"]
    (folder / "summary.json").unlink()
    (manifest,) = manifests(folder)
    file = manifest.parent / "rank_0.pt"
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        case "no manifest":
            manifest.write_text("not json")
        case "foreign":
            manifest.write_text(manifest.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
        case "missing":
            file.unlink()
        case "no rows":
            (folder / "metrics.jsonl").write_text("")
    before = (folder / "metrics.jsonl").read_text()
    assert launch("cnn", arguments) == 2
    said = capsys.readouterr().err
    assert str(folder) in said
    assert DAMAGES[damage] in said
    assert (folder / "metrics.jsonl").read_text() == before


def test_another_number_of_workers_starts_from_the_mean_model(tmp_path: Path) -> None:
    first = [*RUN, "workers=simulated", "workers.count=4", "training.steps=4", f"run_dir={tmp_path}/first"]
    assert launch("cnn", first) == 0
    mean_model = tmp_path / "first" / "checkpoints" / "last.pt"
    assert mean_model.stat().st_size < 100_000  # not the matrix of all workers
    two = [*RUN, "workers=simulated", "workers.count=2", "training.steps=4"]
    assert launch("cnn", [*two, f"run_dir={tmp_path}/second", f"init_from={mean_model}", "optimizer.lr=1e-12"]) == 0
    before, after = (
        torch.load(tmp_path / run / "checkpoints" / "last.pt", weights_only=True) for run in ("first", "second")
    )
    for name, tensor in before.items():
        if "running" not in name and "tracked" not in name:  # BatchNorm's statistics go on
            assert torch.allclose(after[name], tensor, atol=1e-6), name
    (tmp_path / "other.pt").write_bytes(b"no model")
    for refused in (
        [f"init_from={tmp_path}/missing.pt"],
        [f"init_from={tmp_path}/other.pt"],
        [f"init_from={mean_model}", "model.width=8"],
    ):
        assert launch("cnn", [*two, f"run_dir={tmp_path}/third", *refused]) == 2
    assert not (tmp_path / "third").exists()


def test_a_run_goes_on_without_what_it_began_with_and_where_it_began(tmp_path: Path) -> None:
    first = [*RUN, "workers=simulated", "workers.count=2", "training.steps=8"]
    assert launch("cnn", [*first, f"run_dir={tmp_path}/first"]) == 0
    model = tmp_path / "first" / "checkpoints" / "best.pt"
    second = [*first, f"init_from={model}"]
    assert launch("cnn", [*second, f"run_dir={tmp_path}/second"]) == 0
    assert launch("cnn", [*second, f"run_dir={tmp_path}/third"]) == 0
    shutil.rmtree(tmp_path / "first")
    forget(tmp_path / "second", 8)
    (tmp_path / "second").rename(tmp_path / "moved")
    free = ["training.device=cpu", "name=moved", "training.checkpoints_kept=1", f"run_dir={tmp_path}/moved"]
    assert launch("cnn", [*second, *free]) == 0
    assert rows(tmp_path / "moved") == rows(tmp_path / "third")


def test_a_rank_that_begins_late_finds_no_other_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*RUN, "training.steps=4", "resume=false", f"run_dir={folder}"]
    finish(Ranks(arguments, 2, tmp_path / "log", late_s=2.0))
    again = Ranks(arguments, 2, tmp_path / "again")
    assert again.wait(LIMIT_S)
    assert again.codes() == [2, 2]
    assert "holds a finished run" in (tmp_path / "again.0").read_text()


def test_rank_0_writes_the_summary_before_any_rank_ends(tmp_path: Path) -> None:
    """Launchers kill all others when the first one ends, perhaps with exit code 75."""
    folder = tmp_path / "run"
    task = "task=tests.training.slow_summary"
    ranks = Ranks([*RUN, "training.steps=4", task, f"run_dir={folder}"], 2, tmp_path / "log")
    ranks.processes[1].join(300)
    assert (folder / "summary.json").exists()
    finish(ranks)
