"""Command lines that Hydra would take and a task refuses."""

import sys
from pathlib import Path

import pytest

from common.training import cli


@pytest.mark.parametrize(
    "argv",
    [
        ["-m"],
        ["--multirun", "seed=1,2"],
        ["-m", "--cfg", "job"],
        ["-mc", "job"],
        ["hydra.mode=MULTIRUN"],
        ["+hydra.mode=multirun", "seed=1"],
    ],
)
def test_several_runs_in_one_command_are_refused_before_anything_starts(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cnn.train", *argv])
    with pytest.raises(SystemExit) as end:
        cli.main("cnn")
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: --multirun (-m, hydra.mode=MULTIRUN): a command trains one run; ")
    assert "python -m scripts.reproduce" in err
    assert list(tmp_path.iterdir()) == []


def test_several_values_of_a_key_are_refused_without_hydras_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cnn.train", "seed=1,2"])
    with pytest.raises(SystemExit) as end:
        cli.main("cnn")
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert "Ambiguous value for argument 'seed=1,2'" in err
    assert "python -m scripts.reproduce" in err
    assert "add --multirun" not in err
