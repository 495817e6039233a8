import json
from pathlib import Path

import pandas as pd
import pytest

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.table_file import TableFile
from common.experiments.tables import load_table
from common.report.tables import build_table, markdown, shown
from scripts.tables import main
from tests.experiments.conftest import make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")


def fill(table, **row_values):
    """Writes every run; row_values: for each row a list of keyword arguments, one for each seed."""
    for cell in table.cells(RUNS):
        values = row_values.get(cell.row.name, [{}] * 3)[cell.seed - 1]
        write_run(cell.run_dir, cell.overrides, **values)


KEYS = ("accuracy", "train_loss", "consensus_distance", "bytes_sent", "time_step_ms")
ACCUMADAM = [
    dict(zip(KEYS, values, strict=True))
    for values in (
        ([10.0, 90.0], [2.0, 0.1], 0.2, 12_000, 5.0),
        ([20.0, 92.0], [2.0, 0.2], 0.3, 12_000, 6.0),
        ([99.0, 97.0], [2.0, 0.6], 0.7, 24_000, 10.0),
    )
]


def test_columns_of_the_gradient_noise_are_shown_once_a_run_has_recorded_it(table):
    fill(table)
    for cell in list(table.cells(RUNS))[3:]:  # the second row's
        with (cell.run_dir / "metrics.jsonl").open("a") as file:
            for step, value in ((10, 9.0), (16, 0.1), (20, None), (25, 0.3), (30, 0.2 + cell.seed)):
                file.write(json.dumps({"step": step, "split": "train", "local_over_noise": value}) + "\n")
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert "global_over_noise_mean" not in frame.columns
    assert list(frame["local_over_noise_mean"]) == [None, pytest.approx(0.3)]  # the second half's medians
    assert list(shown(frame, collection.table)["local_over_noise_mean"]) == ["not recorded", "0.3"]


def test_csv_and_markdown(registered, capsys):
    fill(registered, accumadam_aer=ACCUMADAM)
    assert main(["table=small"]) == 0
    lines = Path("runs/report/small.csv").read_text().splitlines()
    assert lines[0] == (
        "method,topology,workers,seeds,accuracy_mean,accuracy_2sigma,train_loss_mean,consensus_distance_mean,"
        "bytes_per_step,time_step_ms"
    )
    assert lines[1:] == [
        "AllReduce,complete,4,3,90,0,0.5,0.25,1000,10",
        "AccumAdam,aer,4,3,93,7.211102551,0.3,0.4,133.3333333,7",
    ]
    text = Path("runs/report/small.md").read_text()
    assert text.startswith("# A small table\n\nMade by a test.\n\n| method ")
    assert "| AccumAdam | aer | 4 | 3 | 93.00 ± 7.21 |" in text
    assert "consensus_distance" in text
    assert "bytes_per_step" not in text  # the eighth column
    for line in (
        "- `accuracy_mean ± 2sigma`: final validation accuracy of the averaged model in percent; mean over seeds, ± 2 ",
        "- Runs: 6 of 6 finished",
        "- Folder: runs",
        "- Hardware: Test CPU, 2 cores, no GPU",
        "- Software: python 3.11.7, torch 2.13.0",
        "- Date: 2026-01-02T03:04:05+00:00 (first start) to 2026-01-02T03:04:15+00:00 (last end)",
        "- Commit: 0123456789abcdef",
        "- Workers: kind=simulated, count=4, per_host=2",
        "- Evaluation: every=10, average=True",
        "- Made by `python -m scripts.tables table=small`",
        "seed=K run_dir=runs/small/allreduce/seed_K`",
    ):
        assert line in text
    assert "Missing" not in text
    assert "93.00 ± 7.21" in capsys.readouterr().out


def test_missing_seeds_are_listed_with_their_commands(registered, capsys):
    cells = list(registered.cells(RUNS))
    write_run(cells[0].run_dir, cells[0].overrides, accuracy=[80.0])
    assert main(["table=small", "output=out"]) == 0
    lines = Path("out/small.csv").read_text().splitlines()
    assert lines[1] == "AllReduce,complete,4,1,80,,0.5,0.25,1000,10"  # one seed has no deviation
    assert lines[2] == "AccumAdam,aer,,0,,,,,,"
    text = Path("out/small.md").read_text()
    assert "- Runs: 1 of 6 finished" in text
    assert f"- allreduce seed 2: not run yet. `{cells[1].command}`" in text
    assert text.count("not run yet") == 5
    out = capsys.readouterr().out
    assert (
        "missing: 5 runs, the first is allreduce seed 2: not run yet: python -m scripts.reproduce table=small\n" in out
    )
    assert out.count("missing: ") == 1
    write_run(cells[5].run_dir, cells[5].overrides, accuracy=[80.0], status="interrupted")
    assert main(["table=small", "output=out"]) == 0
    why = "accumadam_aer seed 3: not finished: status 'interrupted' at step 30"
    assert f"missing: {why}: {cells[5].command} resume=true\n" in capsys.readouterr().out


def test_the_kept_page_is_made_from_kept_runs_alone_and_has_findings(monkeypatch, capsys):
    table = make_table(findings="- AER wins.\n", shown=["topology", "accuracy_mean"])
    monkeypatch.setattr("scripts.tables.load_table", lambda *_, **__: table)
    for cell in table.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, accuracy=[1.0])
    kept = list(table.cells(Path("results/runs")))[1:]
    for cell in kept:
        write_run(cell.run_dir, cell.overrides, accuracy=[80.0])
    assert main(["table=small", "--keep"]) == 0
    text = Path("results/tables/small.md").read_text()
    for part in (
        "\n\n| topology | accuracy_mean ± 2sigma |\n| --- | ---: |\n| complete | 80.00 ± 0.00 |\n",
        "\n\n4 workers. [All columns](small.csv)\n\n## Findings\n\n- AER wins.\n\n## Columns\n\n- `topology`: who ",
        "- Folder: results/runs\n",
        "- Made by `python -m scripts.tables table=small --keep`\n",
        "- Runs made by `python -m scripts.reproduce table=small`;",
        "- allreduce seed 1: not run yet. `python -m cnn.train ",
        "run_dir=runs/small/allreduce/seed_1`",
    ):
        assert part in text
    assert main(["table=small"]) == 0
    assert "## Findings" not in Path("runs/report/small.md").read_text()
    for wrong in ("runs=runs", "benchmarks=b", "output=out"):
        assert main(["table=small", "--keep", wrong]) == 2
        assert "--keep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "table=...: missing; expected a file"),
        (["readme=none.md"], "readme=none.md: no such file"),
        (["readme=A.md", "table=3"], "readme=A.md: expected no other key"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_any_runs_side_by_side(monkeypatch, capsys, caplog):
    monkeypatch.setenv("COLUMNS", "240")
    write_run(Path("runs/cnn/a/lr=1"), ["seed=1", "optimizer.lr=1", "run_dir=x"], accuracy=[80.0])
    write_run(Path("runs/cnn/a/lr=2"), ["seed=1", "optimizer.lr=2", "topology=aer"], accuracy=[81.5])
    write_run(Path("runs/cnn/a/lr=3"), ["seed=1", "optimizer.lr=3"], status="interrupted")
    assert main(["runs=runs/cnn/a"]) == 0
    heading, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading[:5] == ["run", "optimizer.lr", "topology", "steps", "accuracy"]
    assert [(row[0], row[1], "81.5" in row) for row in rows] == [
        ("runs/cnn/a/lr=1", "1", False),
        ("runs/cnn/a/lr=2", "2", True),
    ]
    caplog.clear()
    for name, overrides in (("texts", [1, {"a": 2}]), ("pairs", ["seed"]), ("list", "seed=1")):
        environment = write_run(Path(f"runs/cnn/a/{name}"), []) / "environment.json"
        environment.write_text(json.dumps(json.loads(environment.read_text()) | {"overrides": overrides}))
    assert main(["runs=runs/cnn/a"]) == 0
    assert caplog.text.count("environment.json: overrides") == 3
    assert "'seed': expected one Hydra override" in caplog.text
    assert main(["runs=nowhere"]) == 2
    assert "runs=nowhere: expected finished runs" in capsys.readouterr().err


def test_unusable_runs_are_named_and_not_averaged_in(table, caplog):
    fill(table)
    cells = list(table.cells(RUNS))
    (cells[0].run_dir / "metrics.jsonl").write_text('{"step": 1')
    write_run(cells[1].run_dir, cells[1].overrides, status="interrupted", accuracy=[1.0])
    write_run(cells[3].run_dir, [*cells[3].overrides, "optimizer.lr=1"], accuracy=[1.0])
    write_run(cells[4].run_dir, cells[4].overrides, accuracy=[])
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert list(frame["seeds"]) == [1, 1]
    assert list(frame["accuracy_mean"]) == [90.0, 90.0]
    assert [missing.cell.label for missing in collection.missing] == [cells[i].label for i in (0, 1, 3, 4)]
    for cell, reason in [
        (cells[0], "metrics.jsonl, line 1: broken"),
        (cells[1], "not finished: status 'interrupted' at step 30"),
        (cells[3], "holds something else: optimizer.lr: 1 there, not set here"),
        (cells[4], "metrics.jsonl records no"),
    ]:
        assert f"skipped {cell.run_dir}: {reason}" in caplog.text


def test_origins_that_differ_are_counted(registered):
    fill(registered)
    path = next(registered.cells(RUNS)).run_dir / "environment.json"
    environment = json.loads(path.read_text())
    environment |= {"git_dirty": True, "hardware": {"cpu": "Other", "cores": 16, "gpus": ["H100", "H100"]}}
    path.write_text(json.dumps(environment))
    assert main(["table=small"]) == 0
    text = Path("runs/report/small.md").read_text()
    assert "- Hardware: Other, 16 cores, 2 x H100 (1 of 6 runs); Test CPU, 2 cores, no GPU (5 of 6 runs)" in text
    assert "0123456789abcdef with uncommitted changes (1 of 6 runs); 0123456789abcdef (5 of 6 runs)" in text


def test_without_any_run_nothing_is_overwritten(registered, capsys):
    assert main(["table=small", "runs=no where"]) == 2
    assert not Path("runs").exists()
    error = capsys.readouterr().err
    assert "no finished run in no where/small" in error
    assert "python -m scripts.reproduce table=small 'runs=no where'" in error


def test_variants_have_columns_of_their_own():
    variants = {"de": ["data=digits"], "fr": ["data=other"]}
    columns = ["method", "workers", "seeds", "de_accuracy_mean", "fr_accuracy_mean", "fr_accuracy_2sigma"]
    table = make_table(variants=variants, columns=columns)
    for cell in table.cells(RUNS):
        final = {"de": 50.0, "fr": 70.0}[cell.variant] + cell.seed
        if (cell.row.name, cell.variant, cell.seed) != ("allreduce", "fr", 3):
            write_run(cell.run_dir, cell.overrides, accuracy=[1.0, final])
    collection = collect(table, RUNS)
    frame = build_table(collection)
    assert list(frame.iloc[0]) == ["AllReduce", 4, "3/2", 52.0, 71.5, pytest.approx(2**0.5)]
    assert list(frame.iloc[1]) == ["AccumAdam", 4, 3, 52.0, 72.0, pytest.approx(2.0)]
    assert [missing.cell.label for missing in collection.missing] == ["allreduce fr seed 3"]
    de, fr = map(collection.of_variant, variants)
    assert (len(de.all_runs), len(fr.all_runs), fr.table.name) == (6, 5, "small_fr")


def test_what_would_end_a_cell_is_escaped():
    assert markdown(pd.DataFrame({"a|b": ["c|d\ne"]}), left=["a|b"]) == "| a\\|b |\n| --- |\n| c\\|d e |"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["accuracy_2sigma"], ["accuracy_2sigma"]),
        (["accuracy_2sigma", "accuracy_mean"], ["accuracy_mean ± 2sigma"]),
        (["accuracy_mean"], ["accuracy_mean ± 2sigma"]),
        ([], ["method", "accuracy_mean ± 2sigma"]),
    ],
)
def test_deviations_are_shown_beside_their_mean_or_alone(names, expected):
    table = make_table(columns=["method", "accuracy_mean", "accuracy_2sigma"], shown=names)
    fill(table)
    assert [*shown(build_table(collect(table, RUNS)), table)] == expected


def test_meteor_may_be_missing():
    """Not the mean of two beside seeds = 3: where a run has none, the row has none."""
    table = make_table(columns=["method", "seeds", "meteor_mean", "meteor_2sigma"])
    for cell in table.cells(RUNS):
        scored = cell.row.name == "allreduce" or cell.seed == 1
        write_run(cell.run_dir, cell.overrides, metrics={"meteor": 0.5} if scored else {})
    frame = build_table(collect(table, RUNS))
    assert frame["meteor_mean"].tolist() == [0.5, None]
    assert shown(frame, table)["meteor_mean ± 2sigma"].tolist() == ["0.5000 ± 0.0000", "missing"]


def test_published_numbers_are_shown_without_any_run(monkeypatch, capsys):
    columns = ["method", "workers", "seeds", "top1_mean", "top1_2sigma", "top1_published"]
    table = make_table(published=["table3"], columns=columns)
    monkeypatch.setattr("scripts.tables.load_table", lambda *_, **__: table)
    assert main(["table=small"]) == 0
    lines = Path("runs/report/small.csv").read_text().splitlines()
    assert lines[1:] == ["AllReduce,,0,,,76.01", "AccumAdam,,0,,,76.54"]
    text = Path("runs/report/small.md").read_text()
    assert "- Table 3: ResNet-50 on ImageNet-1K. From Promise to Practice" in text
    assert "76.54" in capsys.readouterr().out
    assert text.count("not run yet. `python -m cnn.train") == 6


def test_several_folders_fill_one_another(registered, capsys):
    """Seed 1 from one's own folder, where it is in both; seed 2 from the kept ones; seed 3 from nowhere."""
    cell = next(registered.cells(Path("runs")))
    write_run(cell.run_dir, cell.overrides, accuracy=[70.0])
    for kept, accuracy in zip(list(registered.cells(Path("kept")))[:2], (10.0, 80.0), strict=True):
        write_run(kept.run_dir, kept.overrides, accuracy=[accuracy])
    assert main(["table=small", "runs=[runs,kept]"]) == 0
    assert Path("runs/report/small.csv").read_text().splitlines()[1].startswith("AllReduce,complete,4,2,75,")
    text = Path("runs/report/small.md").read_text()
    assert "- Folder: runs (1 of 2 runs); kept (1 of 2 runs)" in text
    assert "- Made by `python -m scripts.tables table=small 'runs=[runs,kept]'`" in text
    assert "allreduce seed 3: not run yet. `python -m cnn.train" in text


def test_runs_without_scores_of_the_test_set_are_listed_with_the_command(monkeypatch, capsys):
    table = make_table(columns=["method", "seeds", "test_paper_bleu_mean"], task="transformer")
    monkeypatch.setattr("scripts.tables.load_table", lambda *_, **__: table)
    for cell in table.cells(RUNS):
        run = write_run(cell.run_dir, cell.overrides, environment={"command": "python -m transformer.train"})
        if (cell.row.name, cell.seed) != ("allreduce", 2):
            (run / "evaluation").mkdir()
            (run / "evaluation" / "test.csv").write_text(f"model,paper_bleu\nlast,{20 + cell.seed}\n")
    assert main(["table=small"]) == 0
    command = "python -m transformer.evaluate run=runs/small/allreduce/seed_2 models=last"
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert missing == [f"missing: runs/small/allreduce/seed_2: no scores of the test set: {command}"]
    text = Path("runs/report/small.md").read_text()
    assert f"- runs/small/allreduce/seed_2: no scores of the test set. `{command}`" in text
    assert Path("runs/report/small.csv").read_text().splitlines()[1:] == ["AllReduce,3,", "AccumAdam,3,22"]


@pytest.mark.parametrize("all_arrive", [True, False])
def test_steps_to_a_target_and_how_much_faster_a_row_is(all_arrive):
    """Evaluations after 15 and 30 steps."""
    late, early, never = (50.0, 90.0), (85.0, 90.0), (50.0, 60.0)
    statistics = ("median", "lowest", "highest", "reached", "speedup")
    target = {"metric": "accuracy", "value": 80.0, "best": "highest"}
    table = make_table(target=target, baseline="allreduce", columns=[f"steps_to_target_{name}" for name in statistics])
    accuracy = {"allreduce": [late] * 3, "accumadam_aer": [early, late, early] if all_arrive else [early, never, never]}
    for cell in table.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, accuracy=accuracy[cell.row.name][cell.seed - 1])
    texts = shown(build_table(collect(table, RUNS)), table)
    assert texts.iloc[0].tolist() == ["30", "30", "30", "3", "baseline"]
    *numbers, speedup = texts.iloc[1].tolist()
    assert numbers == (["15", "15", "30", "3"] if all_arrive else ["inf", "15", "inf", "1"])
    mean = f"{2 ** (2 / 3):.2f} ["  # geometric mean of 2, 1 and 2
    assert speedup.startswith(mean) if all_arrive else speedup == "not reached by all"


def test_a_definition_takes_what_it_does_not_state_from_its_base():
    assert [*TableFile.model_validate({"base": "quickstart", "rows": None}).rows] == [*load_table("quickstart").rows]
    row = {"name": "allreduce", "topology": "grid"}
    table = TableFile.model_validate({"base": "steps_to_target", "title": "Mine", "rows": [row]})
    base = load_table("steps_to_target")
    assert (table.columns, table.target, table.base, table.title) == (base.columns, base.target, None, "Mine")
    assert [row.name for row in table.rows] == [row.name for row in base.rows]
    assert (table.rows[0].topology, table.rows[0].method) == ("grid", "AllReduce")
    assert table.rows[1] == base.rows[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "steps_to_taget"}, "base=steps_to_taget: unknown; did you mean 'steps_to_target'"),
        ({"base": "quickstart", "rows": [{"method": "A"}]}, "rows.7.name"),
        ({"base": "quickstart", "rows": ["A"]}, "rows: expected a list of rows, each with keys"),
        ({"base": "gpt2_horizon_20"}, "base=gpt2_horizon_20: expected a table that has no base itself"),
    ],
)
def test_wrong_bases_are_refused(changes, message):
    with pytest.raises((ValueError, UsageError)) as caught:
        make_table(**changes)
    assert message in str(caught.value)
