"""The command line of a task, with one run and with several."""

import json
import sys
from pathlib import Path

import pytest

from common.config.config import ConfigError
from common.launch import cli
from common.record import INTERRUPTED

SMALL = ["training.steps=2", "model.width=4", "training.batch_size=8", "logging.progress=false", "training.threads=1"]


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Return the exit code of `python -m cnn.train ARGV`."""
    monkeypatch.setattr(sys, "argv", ["cnn.train", *argv])
    with pytest.raises(SystemExit) as end:
        cli.main("cnn")
    return end.value.code


def test_multirun_trains_every_combination_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["-m", "seed=1,2", "optimizer.lr=1e-3,2e-3", "workers.count=1", *SMALL]
    assert run(monkeypatch, *argv) == 0
    summaries = sorted(str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("summary.json"))
    assert summaries == [
        f"runs/cnn/default/seed_{seed}/optimizer.lr={lr}" for seed in (1, 2) for lr in ("0.001", "0.002")
    ]
    assert all(json.loads((tmp_path / folder / "summary.json").read_text())["steps"] == 2 for folder in summaries)
    told = capsys.readouterr().err
    assert "run 4 of 4" in told
    assert told.splitlines()[-1] == "a table of these runs: python -m scripts.tables runs=runs/cnn/default"
    assert run(monkeypatch, *argv, "resume=true") == 0
    assert capsys.readouterr().err.count("finished already") == 4
    assert run(monkeypatch, *argv) == 2
    assert capsys.readouterr().err.count("holds a finished run; expected an empty or new folder (name=...") == 4


def test_multirun_refuses_everything_if_one_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--multirun", "seed=1,2", "training.batch_size=8,-1", "workers.count=1") == 2
    assert "training.batch_size=-1" in capsys.readouterr().err
    assert run(monkeypatch, "-m", "seed=interval(1,2)") == 2
    assert "sweep type" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert run(monkeypatch, "-m", "seed=1,2") == 2
    assert "--multirun: expected one run under torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("codes", "expected", "started"), [([0, 1, 0], 1, 3), ([0, 2, 1], 2, 3), ([0, INTERRUPTED, 0], INTERRUPTED, 2)]
)
def test_multirun_ends_with_the_largest_exit_code_and_at_an_interruption(
    codes: list[int], expected: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(codes)
    monkeypatch.setattr(cli, "execute", lambda config, overrides: left.pop(0))
    assert run(monkeypatch, "-m", "seed=range(1,4)", "workers.count=1") == expected
    assert len(left) == 3 - started


def test_a_run_dir_that_several_runs_would_share_gets_folders() -> None:
    jobs = cli.combinations("cnn", ["topology=ring,complete", "run_dir=runs/mine", "workers.count=2"])
    assert [config.run_dir for _, config in jobs] == ["runs/mine/topology=ring", "runs/mine/topology=complete"]
    assert all("run_dir='runs/mine/topology=" in overrides[-1] for overrides, _ in jobs)
    with pytest.raises(ConfigError, match="extraneous input"):
        cli.combinations("cnn", ["seed=(1"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("run_dir=~/a,/b", ["/home/me/a", "/b"]),
        ("init_from=lr=1/a.pt,~/lr=2/a.pt,null", ["lr=1/a.pt", "/home/me/lr=2/a.pt", None]),
        ("name=lr=1,lr=2", ["lr=1", "lr=2"]),
        ("name=1e3, 007,true", ["1e3", "007", "true"]),
        ("name='a,b',c", ["a,b", "c"]),
        ("name=choice(a,b)", ["a", "b"]),
    ],
)
def test_texts_are_split_at_commas(word: str, expected: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    jobs = cli.combinations("cnn", [word, "workers.count=1"])
    assert [getattr(config, word.partition("=")[0]) for _, config in jobs] == expected


def test_folders_of_several_runs_are_named_after_plain_texts() -> None:
    jobs = cli.combinations("cnn", ["init_from=a.pt,b.pt", "workers.count=1"])
    assert [Path(config.run_dir).name for _, config in jobs] == ["init_from=a.pt", "init_from=b.pt"]
    jobs = cli.combinations("cnn", ["topology=base_k", "topology.k=1,2", "workers.count=4"])
    assert [Path(config.run_dir).name for _, config in jobs] == ["topology.k=1", "topology.k=2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "seed=1,1"], "--multirun: two runs with run_dir=runs/cnn/default/seed_1: expected each value once"),
        (["topology=file"], "topology.path: missing"),
        (["task=nope"], "task=nope: expected a package with a module `task`"),
        (["task=gpt2"], "task=gpt2: expected a task with the configuration of this command"),
        (["init_from=nope.pt"], "init_from=nope.pt: cannot be read"),
        (["data=null"], "data=null: expected one of: "),
        (["topology=rign", "--cfg", "job"], "topology=rign: unknown; did you mean 'ring'?"),
        (["-m", "--cfg", "job", "seed=1,2"], "--multirun --cfg: expected one of them"),
        (["-m", "--config-name", "gpt2", "seed=1,2"], "--config-name: expected none"),
        (["-m", "--config-dir", ".", "seed=1,2"], "--config-dir . with --multirun"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
    ],
)
def test_what_cannot_be_composed_or_followed_is_one_line(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cnn.train", "experiment=quickstart", "optimizer.lr=0.5", "--cfg", "job"])
    cli.main("cnn")
    assert "lr: 0.5" in capsys.readouterr().out


def test_the_help_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    starts = ("python -m cnn.train ex", "python -m cnn.train wo", "torchrun")
    assert sum(line.strip().startswith(starts) for line in shown.splitlines()) == 4
    for part in ("optimizer: accumadam", "topology: aer", "training.batch_size", "resume=true", "75 interrupted"):
        assert part in shown


def test_the_traceback_of_a_refused_configuration_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run(monkeypatch, "optimizer.lrr=1") == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "error: optimizer.lr" in error


def test_ones_own_folder_of_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "lr=1,it's [(mine"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text("# @package _global_\ntraining: {steps: -7}\n")
    assert run(monkeypatch, "--config-dir", str(own), "experiment=mine") == 2
    assert "training.steps=-7" in capsys.readouterr().err


def test_several_values_of_a_key_without_multirun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "seed=1,2") == 2
    err = capsys.readouterr().err
    assert "Ambiguous value for argument 'seed=1,2'" in err
    assert "add --multirun" in err
