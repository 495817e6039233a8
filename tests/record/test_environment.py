"""The record of the code that was run."""

import subprocess
from pathlib import Path

import pytest

from common.record import environment


def test_uncommitted_changes_are_those_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def dirty() -> bool:
        return environment.describe_environment("gpt2", [])["git_dirty"]

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/table.csv"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    assert not dirty()
    (tmp_path / "results" / "table.csv").write_text("2")  # what measurements write
    (tmp_path / "notes.txt").write_text("3")
    assert not dirty()
    (tmp_path / "code.py").write_text("4")
    assert dirty()
