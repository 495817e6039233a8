"""Complete runs from the command line: processes, torchrun and simulation give the same records."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from common.config.config import ConfigError
from common.config.overrides import choices
from common.experiments.runs import read_run
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.noise_scale import KINDS
from common.record.run_folder import GONE, RunFolder
from common.training.recorder import Recorder
from common.training.task import load_task
from tests.training.runs import Ranks, finish, rows, summary

SHORT = ["training.steps=12", "schedule.warmup=2", "evaluation.every=6", "logging.every=4"]
QUIET = ["logging.progress=false", "training.threads=1", "model.width=4"]
EVALUATIONS = ["evaluation.local_models=true", "evaluation.recalibrate_batches=3", "evaluation.keep_average=true"]
# Local steps reach processes and simulation by the same options: one method with all of them stands for the others.
METHODS = {
    "allreduce": [
        *("parallel=allreduce", "optimizer=adamw", "optimizer.weight_decay=0.1"),
        *("training.clip=1.0", "training.gradient_accumulation=2", "logging.noise_scale_every=2"),
    ],
    "accumadam_aer": [
        *("topology=aer", "workers.per_host=2", "optimizer=accumadam", "training.precision=fp16"),
        *("training.clip=0.5", "training.gradient_accumulation=2"),
    ],
    # The first evaluation, after which all go on from the mean model, is in the middle of a round.
    "gossip_diloco": ["parallel=gossip_diloco", "parallel.local_steps=5", "parallel.merge_after=3", *EVALUATIONS],
    "two_ranks_allreduce": ["parallel=allreduce", "workers.count=2", "parallel.ranks_per_worker=2", *EVALUATIONS],
    "servers_dmsgd": [
        *("workers.count=2", "parallel.ranks_per_worker=2", "parallel.order=atc", "optimizer=dmsgd"),
        *("optimizer.lr=0.1", "optimizer.lr_batch=256", "schedule=multistep", "schedule.unit=epochs"),
        *("schedule.milestones=[0.5,0.9]", "schedule.warmup=0.2", *EVALUATIONS),
    ],
}
REPEATED = ("two_ranks_allreduce", "servers_dmsgd", "accumadam_aer")  # their parts are in other methods too
NOISE = [f"{name}{kind}" for name in ("noise_scale", "local_over_noise", "global_over_noise") for kind in KINDS]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else []) for name in METHODS]
)
def test_processes_and_simulation_agree(method: str, tmp_path: Path) -> None:
    arguments = [*SHORT, *QUIET, "workers.count=4", *METHODS[method]]
    assert launch("cnn", [*arguments, f"run_dir={tmp_path}/processes"]) == 0
    assert launch("cnn", [*arguments, "workers=simulated", f"run_dir={tmp_path}/simulated"]) == 0
    real, simulated = rows(tmp_path / "processes"), rows(tmp_path / "simulated")
    assert [(r["step"], r["split"]) for r in real] == [
        (4, "train"), (6, "validation"), (8, "train"), (12, "train"), (12, "validation")
    ]  # fmt: skip
    for one, other in zip(real, simulated, strict=True):
        assert one.keys() == other.keys()
        assert one["bytes_sent"] == other["bytes_sent"]
        assert one["lr"] == other["lr"] if "lr" in one else True
        for name in one.keys() & {"loss", "local_loss"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4)
        if method == "allreduce" and one["split"] == "train":
            for name in NOISE:
                assert one[name] == pytest.approx(other[name], rel=1e-2)
        if "consensus_distance" in one:
            assert one["consensus_distance"] == pytest.approx(other["consensus_distance"], rel=1e-2, abs=1e-5)


def test_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*SHORT, *QUIET, "workers=simulated", "workers.count=3", "training.batch_size=96", f"run_dir={run}"]
    assert launch("cnn", arguments) == 0
    names = ["checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "summary.json"]
    assert sorted(f.name for f in run.iterdir()) == names
    config = OmegaConf.load(run / "config.yaml")
    assert (config.workers.count, config.topology.name, config.training.steps) == (3, "one_peer_exponential", 12)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["overrides"] == arguments
    assert environment["start"] <= environment["end"]
    assert environment["hardware"]["cores"] >= 1
    record = summary(run)
    assert (record["status"], record["steps"], record["workers"]) == ("finished", 12, 3)
    assert record["bytes_sent"] == rows(run)[-1]["bytes_sent"] > 0
    assert record["last"]["validation"]["accuracy"] == rows(run)[-1]["accuracy"]
    assert record["best"]["validation"]["accuracy"] == max(r["accuracy"] for r in rows(run) if "accuracy" in r)


def test_median_and_mean_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert launch("cnn", [*SHORT, *QUIET, "logging.progress=true", "workers=simulated", f"run_dir={run}"]) == 0
    times = [row["time_step_ms"] for row in rows(run, times=True) if row["split"] == "train"]  # means of 4 steps each
    record = summary(run)
    assert record["time_step_ms_mean"] == pytest.approx(sum(times) / len(times))
    assert 0 < record["time_step_ms"] != record["time_step_ms_mean"]
    shown = dict(re.findall(r"ms per step \((median|mean)\) +([\d.]+)", capsys.readouterr().err))
    assert shown == {"median": f"{record['time_step_ms']:.5g}", "mean": f"{record['time_step_ms_mean']:.5g}"}


def test_what_a_run_folder_holds_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = [*SHORT, *QUIET, "workers=simulated", "workers.count=2", f"run_dir={run}"]
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert launch("cnn", arguments) == 2
    assert "resume=true continues it" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert launch("cnn", [*arguments, "resume=true"]) == 0  # it holds no checkpoint and no configuration
    before = (run / "metrics.jsonl").read_text()
    assert launch("cnn", arguments) == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert launch("cnn", [*arguments, "resume=true"]) == 0
    assert "finished already" in capsys.readouterr().err
    assert launch("cnn", [*arguments, "resume=true", "optimizer.lr=0.5", "logging.every=5"]) == 2
    difference = capsys.readouterr().err
    assert "optimizer.lr: 0.001 there, 0.5 now" in difference
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("workers", ["workers=simulated", "workers.count=2", "elastic.min_workers=2"])
def test_a_second_run_in_the_folder_of_one_that_trains_is_refused(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = [*SHORT, *QUIET, "resume=true", f"run_dir={run}", "workers.count=2", workers]
    first = RunFolder(compose_config("cnn", arguments), arguments)
    first.append({"step": 4})
    assert launch("cnn", arguments) == 2
    assert f"run_dir={run}: process {os.getpid()} on " in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == '{"step": 4}\n'
    first.close()
    with pytest.raises(ConfigError, match="resume=true continues it"):
        RunFolder(compose_config("cnn", [*arguments, "resume=false"]), [])
    with pytest.raises(ConfigError, match=r"0\.001 there, 0\.5 now$"):  # there is no model to go on from
        RunFolder(compose_config("cnn", [*arguments, "optimizer.lr=0.5"]), [])


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    config = compose_config("cnn", [f"run_dir={tmp_path}/run"])
    folder = RunFolder(config, [])
    folder.append({"step": 1, "split": "train", "loss": math.nan, "grad_norm": math.inf})
    folder.append({"step": 1, "split": "membership", "sums": [1.0, -math.inf]})
    folder.finish({"status": "finished", "last": {"train": {"loss": math.nan}}, "bytes_sent": 1})
    folder.close()
    run = read_run(tmp_path / "run")
    assert run.summary == {"status": "finished", "last": {"train": {"loss": None}}, "bytes_sent": 1}
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1, "split": "train", "loss": null, "grad_norm": null}',
        '{"step": 1, "split": "membership", "sums": [1.0, null]}',
    ]
    assert math.isnan(run.last("train", "loss"))


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_an_evaluation_that_is_not_a_number_is_the_worst(higher_is_better: bool) -> None:
    task = SimpleNamespace(primary_metric="loss", higher_is_better=higher_is_better)
    recorder = Recorder(SimpleNamespace(), task, None)
    counters, streams = SimpleNamespace(bytes_sent=0), [SimpleNamespace(epochs=1.0)]
    model = SimpleNamespace(clock=1, counters=counters)
    recorder._workers, recorder._device = [SimpleNamespace(model=model, streams=streams)], torch.device("cpu")
    values = [math.nan, math.nan, 3.0, math.nan, 4.0, 2.0]
    best = [recorder.validation({"loss": value}) for value in values]
    assert best == [True, False, True, False, higher_is_better, not higher_is_better]


def test_a_full_disk_leaves_the_error_and_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RunFolder, row: dict[str, Any]) -> None:
        monkeypatch.setattr("os.fsync", fail)
        fail(0)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "append", full)
    run = tmp_path / "run"
    assert launch("cnn", [*SHORT, *QUIET, "workers=simulated", f"run_dir={run}"]) == 1
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1
    assert error.endswith(f"run_dir={run}: cannot record that the run failed (No space left on device)\n")
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "environment.json", "metrics.jsonl"]


def test_reduced_precision_trains(tmp_path: Path) -> None:
    arguments = [*SHORT, *QUIET, "workers=simulated", "workers.count=2", "training.precision=bf16"]
    assert launch("cnn", [*arguments, "training.clip=1.0", f"run_dir={tmp_path}/run"]) == 0
    losses = [row["loss"] for row in rows(tmp_path / "run") if row["split"] == "train"]
    assert losses[-1] < losses[0] < 5


@pytest.mark.slow
def test_torchrun_equals_local_processes(tmp_path: Path) -> None:
    arguments = [*SHORT, *QUIET, "topology=ring"]
    finish(Ranks([*arguments, f"run_dir={tmp_path}/torchrun"], 2, tmp_path / "log"))  # with torchrun's environment
    assert launch("cnn", [*arguments, "workers.count=2", f"run_dir={tmp_path}/local"]) == 0
    assert rows(tmp_path / "torchrun") == rows(tmp_path / "local")


def test_a_bad_folder_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert launch("cnn", [*SHORT, *QUIET, f"run_dir={blocked}/run"]) == 2
    assert launch("cnn", [*SHORT, *QUIET, "workers.count=2", f"run_dir={blocked}/run"]) == 2
    assert launch("cnn", [*SHORT, *QUIET, "training.batch_size=2048", f"run_dir={tmp_path}/run"]) == 2


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ("cnn", {"data": "imagenet", "model": "resnet50", "experiment": "imagenet/vit_b_16"}),
        ("transformer", {"data": "wmt14_en_de", "model": "transformer_big", "experiment": "figure6/sgp"}),
        ("gpt2", {"data": "tokens", "model": "gpt2_xl", "experiment": "gpt2_fair"}),
    ],
)
def test_a_task_offers_its_own_data_models_and_recipes(task: str, own: dict[str, str]) -> None:
    config_class = load_task(task).config_class
    foreign = {"imagenet", "wmt14_en_de", "tokens", "resnet50", "transformer_big", "gpt2_xl"} - {*own.values()}
    foreign |= {"imagenet/vit_b_16", "figure6/sgp", "gpt2_fair", "table3/base"} - {*own.values()}
    for group, name in own.items():
        offered = choices(config_class, group)
        assert name in offered
        assert not foreign & {*offered}
    with pytest.raises(ConfigError, match=f"data=nothing: unknown; expected one of: .*{own['data']}"):
        compose_config(task, ["data=nothing"])


def test_every_host_is_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = RunFolder(compose_config("cnn", [f"run_dir={run}"]), [])
    folder.record_hosts(["one", "one", "two", "two"])
    assert json.loads((run / "environment.json").read_text())["hosts"] == ["one", "two"]


@pytest.mark.parametrize(("overrides", "expected"), [([], 1), (["training.threads=2"], 2)])
def test_simulated_workers_take_one_thread_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: int
) -> None:
    """Several threads of small operations wait for each other, for long beside any other busy process."""
    counts: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    quiet = ["logging.progress=false", "model.width=4", "training.steps=1", "workers=simulated", "workers.count=2"]
    assert launch("cnn", [*quiet, *overrides, f"run_dir={tmp_path}/run"]) == 0
    assert counts == [expected]


@pytest.mark.parametrize(("where", "said"), [("append", GONE), ("metrics_bytes", GONE), ("finish", "No such file")])
def test_a_run_whose_folder_is_removed_ends_and_does_not_make_it_again(
    where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, method = tmp_path / "removed" / "run", getattr(RunFolder, where)

    def removed(folder: RunFolder, *arguments: Any) -> Any:
        shutil.rmtree(run.parent, ignore_errors=True)
        return method(folder, *arguments)

    monkeypatch.setattr(RunFolder, where, removed)
    few = ["training.steps=2", "schedule.warmup=0", "training.checkpoint_every=1", "workers=simulated"]
    assert launch("cnn", [*QUIET, *few, "workers.count=2", f"run_dir={run}"]) == 1
    error = capsys.readouterr().err
    assert str(run) in error
    assert said in error
    assert not run.parent.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([f"model.width={10**13}"], "model=resnet_digits: does not fit into memory ("),
        (["schedule.unit=epochs", "schedule.warmup=5"], "schedule Cosine: warmup_steps=55: expected fewer than"),
        (["optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"], "Nesterov momentum requires a momentum"),
        (["topology=random_matching", "parallel.phases=staggered"], "parallel.phases='staggered': topology 'rand"),
    ],
)
def test_what_a_model_or_its_optimizer_refuses_leaves_no_folder(
    wrong: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["training.steps=2", "schedule.warmup=0", "workers=simulated", "workers.count=2"]
    assert launch("cnn", [*QUIET, *few, *wrong, f"run_dir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "summary.json"])
def test_records_that_are_damaged_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Or are written anew, where nothing depends on them; and no lock is left."""
    config, file = compose_config("cnn", [f"run_dir={tmp_path}/run", "resume=true"]), tmp_path / "run" / name
    RunFolder(config, []).close()
    for content in (b"caf\xe9", b"[1, 2]", b"3", b"null", b'{"start": ', b""):
        file.write_bytes(content)
        try:
            RunFolder(config, []).close()
        except ConfigError as error:
            first = str(error).splitlines()[0]
            assert f"{file}: is damaged, expected" in first or (
                name == "config.yaml" and "another configuration" in first
            )
            assert file.read_bytes() == content
        else:
            assert name == "summary.json"
        assert not (tmp_path / "run" / ".lock").exists()
