"""`make gpu-check` goes on where it was interrupted, skips what no longer fits, and says so."""

import time
from pathlib import Path

import pytest

from tests.gpu import __main__ as runner
from tests.gpu.record import GpuRecord


class Checks:
    """Stand-ins for the checks: each takes no time and has these results, None where it does not end in time."""

    def __init__(self, folder: Path, commit: str = "c0ffee", **results: str | None) -> None:
        self.record, self.made = GpuRecord(str(folder)), []
        self.record._benchmark._environment |= {"git_commit": commit, "git_dirty": False}
        self._results = dict.fromkeys(runner.CHECKS, "passed") | results

    def __call__(self, name: str, limit_s: float) -> bool:
        self.made.append(name)
        if self._results[name] is not None:
            check = runner.import_module(f"tests.gpu.test_{name}").CHECK
            self.record.add(check, "test", self._results[name], [f"measured {name}"], 300.0)
        return self._results[name] is not None

    def run(self, *names: str, left_s: float = 1e6) -> bool:
        return runner.check_all(self.record, names, time.monotonic() + left_s, self)

    def results(self) -> dict[str, str]:
        numbers = {runner.import_module(f"tests.gpu.test_{name}").CHECK[0]: name for name in runner.CHECKS}
        return {numbers[number]: row["result"] for number, row in self.record.rows.items()}


def test_what_has_passed_here_is_made_again_only_if_it_is_named(tmp_path: Path) -> None:
    first = Checks(tmp_path, races="failed", memory=None, overlap="skipped")
    assert not first.run()
    assert first.made == list(runner.CHECKS)  # one that fails does not end the others
    assert {name: result for name, result in first.results().items() if result != "passed"} == {
        "races": "failed", "memory": "skipped", "overlap": "skipped",
    }  # fmt: skip
    assert "did not end in the" in first.record.rows[8]["figure"]
    second = Checks(tmp_path)
    assert second.run()
    assert second.made == ["races", "memory", "overlap"]
    named = Checks(tmp_path)
    assert named.run("speed")
    assert named.made == ["speed"]
    other = Checks(tmp_path, commit="decade")
    assert other.run()
    assert other.made == list(runner.CHECKS)


def test_what_no_longer_fits_is_skipped_and_says_so(tmp_path: Path) -> None:
    assert Checks(tmp_path, commit="decade", runs="skipped").run("ranks", "races", "runs")
    late = Checks(tmp_path)
    assert late.run("ranks", "races", "runs", left_s=200)  # passed ones took 300 s
    assert late.made == ["runs"]
    assert late.results() == {"ranks": "skipped", "races": "skipped", "runs": "passed"}
    assert late.record.rows[4]["figure"].startswith("no time: it takes 300 s or more, and ")
    over = Checks(tmp_path)
    assert over.run("runs", left_s=runner.LEAST_S - 1)
    assert not over.made


def test_a_check_that_does_not_end_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "pytest_on", lambda *_: ["sleep", "60"])
    begun = time.monotonic()
    assert not runner.run("races", 0.2)
    assert time.monotonic() - begun < 30


def test_an_unknown_check_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["checks=races", "checks=rases"]) == 2
    error = capsys.readouterr().err
    assert "checks" in error
    assert "rases" in error
    assert "'host_syncs'" in error
