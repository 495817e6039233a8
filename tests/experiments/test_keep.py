from pathlib import Path

from common.experiments.collect import collect
from scripts.keep import RECORDS, main
from tests.experiments.synthetic import write_run


def test_records_of_finished_runs_are_kept_without_weights(registered):
    cells = list(registered.cells(Path("runs")))
    for cell in cells[1:]:
        write_run(cell.run_dir, cell.overrides)
        (cell.run_dir / "checkpoints").mkdir()
        (cell.run_dir / "checkpoints" / "last.pt").write_bytes(b"weights")
    assert main(["table=small", "output=kept"]) == 0
    for cell in cells[1:]:
        kept = Path("kept") / cell.run_dir.relative_to("runs")
        assert sorted(f.name for f in kept.iterdir()) == sorted(RECORDS)
        assert (kept / "metrics.jsonl").read_bytes() == (cell.run_dir / "metrics.jsonl").read_bytes()
    assert len(collect(registered, Path("kept")).all_runs) == len(cells) - 1


def test_scores_of_an_earlier_run_do_not_stay(registered):
    cell = next(registered.cells(Path("runs")))
    scores = write_run(cell.run_dir, cell.overrides) / "evaluation" / "test.csv"
    scores.parent.mkdir()
    scores.write_text("model,bleu\nlast,1\n")
    kept = Path("kept") / scores.relative_to("runs")
    for exists in (True, False):
        assert main(["table=small", "output=kept"]) == 0
        assert kept.exists() == exists
        scores.unlink(missing_ok=True)


def test_nothing_to_keep_is_an_error(registered):
    assert main(["table=small"]) == 2
