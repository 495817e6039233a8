import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from common.cli import UsageError
from common.experiments.collect import collect, score_arguments
from common.experiments.definitions import ROOT, parse_override
from common.experiments.runs import runs_below
from common.explorer import live
from common.report.tables import build_table, missing_summary, table_page
from scripts.reproduce import main
from tests.experiments.synthetic import write_run
from tests.waiting import LIMIT_S, wait_for

RUNS = Path("runs")


@pytest.fixture
def launched(monkeypatch):
    """A launch that writes a finished run; returns the list of calls. `behave(overrides)` may be replaced."""
    calls = []

    def launch(task, overrides):
        calls.append((task, overrides))
        code = module.behave(overrides)
        if code == 0:
            write_run(Path(dict(map(parse_override, overrides))["run_dir"]), overrides)
        return code

    module = types.ModuleType("common.launch.processes")
    module.launch, module.behave, module.calls = launch, lambda overrides: 0, calls
    monkeypatch.setitem(sys.modules, "common.launch.processes", module)
    return module


def write_cell(cell, extra=(), **values):
    return write_run(cell.run_dir, [*cell.overrides, *extra], **values)


def test_makes_every_run_seed_by_seed_with_a_line_each_and_once_only(registered, launched, capsys):
    assert main(["table=small"]) == 0
    cells = sorted(registered.cells(RUNS), key=lambda cell: cell.seed)
    expected = [[*cell.overrides, "logging.progress=false"] for cell in cells]
    assert launched.calls == [("cnn", overrides) for overrides in expected]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("[1/6] allreduce seed 1      accuracy 90.00  ")
    assert lines[0].endswith(" left")
    assert lines[1].startswith("[2/6] accumadam_aer seed 1  accuracy 90.00  ")
    assert lines[-1] == "6 of 6 runs finished"
    assert main(["table=small"]) == 0
    assert len(launched.calls) == 6
    assert capsys.readouterr().out.count("already finished") == 6


def test_rows_of_a_variant_are_made_side_by_side(registered, launched, monkeypatch):
    variants = {"slow": ("training.steps=20",), "fast": ("training.steps=10",)}
    table = registered.model_copy(update={"variants": variants, "seeds": (2, 1)})
    monkeypatch.setattr("scripts.reproduce.load_table", lambda name: table)
    assert main(["table=small"]) == 0
    folders = [parse_override(overrides[-2])[1] for _, overrides in launched.calls]
    assert folders == [
        f"runs/small/{row}/{variant}/seed_{seed}"
        for seed in (2, 1)
        for variant in ("slow", "fast")
        for row in ("allreduce", "accumadam_aer")
    ]


def test_unfinished_runs_are_made_and_continue_what_their_folder_holds(registered, launched):
    cells = list(registered.cells(RUNS))
    for cell in cells[1:]:
        write_cell(cell)
    write_cell(cells[1], status="failed")
    write_cell(cells[4], status="interrupted")
    (cells[5].run_dir / "summary.json").unlink()
    assert main(["table=small"]) == 0
    made = [overrides for _, overrides in launched.calls]
    assert made == [
        [*cells[0].overrides, "logging.progress=false"],
        [*cells[1].overrides, "logging.progress=false", "resume=true"],
        [*cells[4].overrides, "logging.progress=false", "resume=true"],
        [*cells[5].overrides, "logging.progress=false", "resume=true"],
    ]


def fail_exit(overrides):
    raise SystemExit(2)


def fail_error(overrides):
    raise RuntimeError("diverged")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (lambda overrides: 1, "exit code 1"),
        (fail_exit, "exit code 2"),
        (fail_error, "RuntimeError: diverged"),
        (lambda overrides: None, "no such folder"),  # says it went well, but leaves no run
    ],
)
def test_a_failing_run_is_reported_and_the_others_go_on(registered, launched, capsys, failure, reason):
    cells = list(registered.cells(RUNS))
    launched.behave = lambda overrides: failure(overrides) if cells[1].overrides[-1] in overrides else 0
    assert main(["table=small"]) == 1
    assert len(launched.calls) == 6
    out, err = capsys.readouterr()
    assert "[3/6] allreduce seed 2      FAILED: " in out
    assert "5 of 6 runs finished" in out
    failed = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1
    assert reason in failed[0]
    assert failed[0].endswith(f"to repeat: {cells[1].command}")


def raise_interrupt(overrides):
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupt", [raise_interrupt, lambda overrides: 75])
def test_an_interruption_stops_and_says_how_to_continue(registered, launched, capsys, interrupt):
    launched.behave = lambda overrides: interrupt(overrides) if len(launched.calls) == 3 else 0
    part = ["table=small", "runs=my runs", "rows=allreduce,accumadam_aer", "seeds=2,3"]
    assert main(part) == 75
    assert len(launched.calls) == 3
    typed = "table=small 'runs=my runs' 'rows=[allreduce,accumadam_aer]' 'seeds=[2,3]'\n"
    assert f"to continue: python -m scripts.reproduce {typed}" in capsys.readouterr().err
    assert main(part) == 0
    assert len(launched.calls) == 3 + 2


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda cell: write_cell(cell, ["optimizer.lr=1"]),
            "holds something else: optimizer.lr: 1 there, not set here",
        ),
        (lambda cell: (write_cell(cell) / "metrics.jsonl").write_text("{"), "metrics.jsonl, line 1: broken"),
        (lambda cell: (write_cell(cell) / "environment.json").unlink(), "environment.json: missing"),
    ],
)
def test_a_folder_with_another_or_a_broken_run_is_refused_before_anything_runs(
    registered, launched, capsys, damage, reason
):
    cell = list(registered.cells(RUNS))[4]
    damage(cell)
    before = {path: path.read_bytes() for path in cell.run_dir.iterdir()}
    assert main(["table=small"]) == 2
    assert launched.calls == []
    error = capsys.readouterr().err
    assert error.startswith(f"error: {cell.run_dir}: {reason}")
    assert "remove this folder or choose another one by runs=" in error
    assert {path: path.read_bytes() for path in cell.run_dir.iterdir()} == before


def test_a_finished_run_without_a_number_of_the_table_is_not_to_be_made(registered, launched, capsys):
    """The command that makes runs refuses it, so that no page may offer that command."""
    lacking, *others = registered.cells(RUNS)
    for cell in others:
        write_cell(cell)
    write_cell(lacking, accuracy=[])
    advice = "drop the table's columns that need it, or remove the run's folder to train it again"
    reason = f"metrics.jsonl records no 'accuracy'; {advice}"
    assert main(["table=small"]) == 2
    assert capsys.readouterr().err == f"error: {lacking.run_dir}: {reason}\n"
    collection = collect(registered, RUNS)
    assert missing_summary(collection) == [f"allreduce seed 1: {reason}"]
    assert f"\n- allreduce seed 1: {reason}\n" in table_page(collection, build_table(collection), "make", kept=False)
    assert not any(missing.lacking for missing in collect(registered, RUNS, make_in=Path("others")).missing)
    for cell in others:
        write_cell(cell, accuracy=[])
        (cell.run_dir / "metrics.jsonl").write_text('{"step": 1, "split": "validation", "loss": 1}')
    with pytest.raises(UsageError, match=f"no finished run in runs/small; {reason}"):
        collect(registered, RUNS)


def test_a_dry_run_prints_what_would_run_and_runs_nothing(registered, launched, capsys):
    cells = list(registered.cells(Path("my runs")))
    write_cell(cells[0])
    write_cell(cells[1], status="interrupted")
    assert main(["table=small", "runs=my runs", "--dry-run"]) == 0
    assert launched.calls == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "# [1/6] allreduce seed 1: finished",
        "# [2/6] allreduce seed 2: interrupted",
        f"{cells[1].command} resume=true",
    ]
    commands = [line for line in lines if not line.startswith("#")]
    assert commands == [f"{cells[1].command} resume=true", *(cell.command for cell in cells[2:])]
    assert shlex.split(commands[1])[-1] == "run_dir='my runs/small/allreduce/seed_3'"
    assert lines[-1] == "# 1 of 6 finished"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (["rows=accumadam_aer"], [("accumadam_aer", 1), ("accumadam_aer", 2), ("accumadam_aer", 3)]),
        (["rows=accumadam_aer,allreduce", "seeds=2"], [("allreduce", 2), ("accumadam_aer", 2)]),
        (["rows=[allreduce]", "seeds=3,1,3"], [("allreduce", 3), ("allreduce", 1)]),
        (["rows=allreduce", "seeds=[2,7]"], [("allreduce", 2), ("allreduce", 7)]),
    ],
)
def test_a_part_of_a_table(registered, launched, capsys, part, expected):
    assert main(["table=small", *part, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert [line.split("run_dir=")[1] for line in out.splitlines() if not line.startswith("#")] == [
        f"runs/small/{row}/seed_{seed}" for row, seed in expected
    ]
    assert ("# seeds that the table does not count: 7; its own are 1, 2, 3" in out) == ("seeds=[2,7]" in part)
    assert main(["table=small", *part]) == 0
    folders = [parse_override(overrides[-2])[1] for _, overrides in launched.calls]
    assert folders == [f"runs/small/{row}/seed_{seed}" for row, seed in expected]


def test_a_variant_of_a_row(capsys):
    part = ["rows=dadam_aer,allreduce/en_fr", "seeds=810975"]
    assert main(["table=table2", *part, "--dry-run"]) == 0
    labels = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# [")]
    assert [label.split("] ")[1].split(" seed")[0] for label in labels] == [
        "allreduce en_fr",
        "dadam_aer en_de",
        "dadam_aer en_fr",
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "rows=allreduce,acumadam_aer",
            "rows=acumadam_aer: unknown; did you mean 'accumadam_aer'? expected one of: acc",
        ),
        ("rows=allreduce/en_de", "rows=allreduce/en_de: unknown; did you mean 'allreduce'? expected one of: "),
        ("rows=", "rows.0=None: expected a valid string"),
        ("seeds=1,x", "seeds=1,x: expected integers, as seeds=1,2"),
        ("jobs=0", "jobs=0: expected greater than 0"),
        ("seeds=1.5", "seeds=1.5: expected integers, as seeds=1,2"),
    ],
)
def test_unknown_rows_and_seeds_that_are_no_integers_are_refused(registered, launched, capsys, part, message):
    assert main(["table=small", part]) == 2
    assert launched.calls == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")


TRAINER = f"""#!{sys.executable}
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from common.experiments.definitions import parse_override
from tests.experiments.synthetic import write_run
from tests.waiting import wait_for
overrides = sys.argv[3:]  # after -m cnn.train
folder = Path(dict(map(parse_override, overrides))["run_dir"])
folder.mkdir(parents=True)
wait_for(lambda: len([*folder.parents[1].glob("*/seed_1")]) == 2)  # for the other run
write_run(folder, overrides)
"""


def test_several_runs_at_a_time_share_the_cores(registered, capsys, monkeypatch, tmp_path: Path):
    trainer = tmp_path / "python"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(trainer))
    assert main(["table=small", "jobs=2", "seeds=1"]) == 0
    assert "2 of 2 runs finished" in capsys.readouterr().out
    environment = (RUNS / "small" / "allreduce" / "seed_1" / "environment.json").read_text()
    assert "training.threads=" in environment
    assert main(["table=small", "seeds=1"]) == 0
    assert capsys.readouterr().out.count("already finished") == 2


def test_a_checkpoint_may_vanish_while_runs_are_looked_for(monkeypatch, tmp_path: Path) -> None:
    run, scan = write_run(tmp_path / "seed_1", []), os.scandir
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "evaluation").mkdir()
    monkeypatch.setattr(os, "scandir", lambda path: scan(path if Path(path) in (tmp_path, run) else "gone"))
    assert runs_below(tmp_path) == [run]
    assert live.ended([tmp_path]) == {run / "summary.json"}
    assert live.unfinished([tmp_path]) == []


def test_no_run_starts_after_one_was_interrupted_alone(registered, monkeypatch, tmp_path: Path) -> None:
    trainer = tmp_path / "python"
    trainer.write_text(f"#!/bin/sh\necho >>{tmp_path}/started\nexit 75\n")
    trainer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(trainer))
    assert main(["table=small", "jobs=2"]) == 75
    assert len((tmp_path / "started").read_text()) <= 2


def test_the_test_set_is_scored_where_the_table_shows_that(registered, launched, monkeypatch, capsys):
    table = type(registered)(**dict(registered) | {"columns": ("method", "test_paper_bleu"), "seeds": (1,)})
    monkeypatch.setattr("scripts.reproduce.load_table", lambda name: table)
    folders = [cell.run_dir for cell in table.cells(RUNS)]
    calls = [["-m", "cnn.evaluate", f"run={folder}", "models=last"] for folder in folders]
    assert main(["table=small", "--dry-run"]) == 0
    assert [shlex.split(line)[1:] for line in capsys.readouterr().out.splitlines() if "evaluate" in line] == calls
    scored = []

    def run(command, check):
        scored.append(command[1:])
        return subprocess.CompletedProcess(command, returncode=len(scored) - 1)  # the second one fails

    monkeypatch.setattr("scripts.score.subprocess.run", run)
    assert main(["table=small"]) == 1
    assert scored == calls
    assert f"failed: {folders[1]}: scoring the test set" in capsys.readouterr().err
    (folders[0] / "evaluation").mkdir()
    (folders[0] / "evaluation" / "test.csv").write_text("model,paper_bleu\nlast,27.5\n")
    assert main(["table=small"]) == 1  # as the third one does
    assert scored[2:] == calls[1:]
    assert score_arguments(table, folders[0], "all") == [*calls[0][:-1], "models=all"]
    (folders[0] / "evaluation" / "test.csv").write_text("model,paper_bleu\nstep_00000030,27.5\nlast,27.5\n")
    assert score_arguments(table, folders[0], "all") == score_arguments(table, folders[0]) == []


@pytest.mark.slow
def test_an_interruption_ends_runs_in_parallel_and_starts_no_others(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "scripts.reproduce", "table=quickstart", "jobs=2", f"runs={runs}"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(list(runs.rglob("metrics.jsonl"))) >= 2)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75
    assert "interrupted; to continue" in errors
    assert {json.loads(file.read_text())["status"] for file in runs.rglob("summary.json")} <= {
        "interrupted",
        "finished",
    }
    assert len(list(runs.rglob("config.yaml"))) <= 4  # two at a time, and what had finished meanwhile
