from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from common.report.collect import collect
from common.report.figures import curves, draw, draw_over_workers, write_figure
from scripts.figures import main
from tests.report.synthetic import write_run

RUNS = Path("runs")


@pytest.fixture
def filled(registered):
    for cell in registered.cells(RUNS):
        loss = np.linspace(2.3, 0.1 * cell.seed, 12)
        write_run(cell.run_dir, cell.overrides, train_loss=loss.tolist(), bytes_sent=24_000_000)
    return registered


def test_files_are_made_and_not_blank(filled, capsys):
    assert main(["figure=small"]) == 0
    assert "written: results/figures/small.png results/figures/small.svg" in capsys.readouterr().out
    image = imread("results/figures/small.png")
    assert image.shape[:2] == (1120, 1440)
    assert image.std() > 0.05
    assert "validation accuracy" in Path("results/figures/small.svg").read_text()


def test_a_large_svg_is_left_out(filled, monkeypatch):
    monkeypatch.setattr("common.report.figures.LARGEST_SVG_BYTES", 10)
    assert main(["figure=small", "output=out"]) == 0
    assert [path.name for path in Path("out").iterdir()] == ["small.png"]


def test_curves_are_against_steps_and_megabytes_per_worker(filled):
    data = curves(collect(filled, RUNS), "validation", "accuracy")
    row = data[data["method"] == "AllReduce"]
    assert sorted(set(row["step"])) == [15, 30]
    assert sorted(set(row["sent_mb"])) == pytest.approx([3.0, 6.0])  # 24 MB of 4 workers
    assert len(row) == 2 * 3  # evaluations x seeds


def test_four_panels_with_a_line_for_each_row(filled):
    figure = draw(collect(filled, RUNS))
    assert len(figure.axes) == 4
    for ax in figure.axes:
        assert len(ax.get_lines()) == 2
    colours = {line.get_color() for line in figure.axes[0].get_lines()}
    styles = {line.get_linestyle() for line in figure.axes[0].get_lines()}
    assert len(colours) == len(styles) == 2
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert legends == ["AllReduce", "AccumAdam", "complete", "aer"]


def test_rows_without_runs_are_left_out_but_keep_their_colours(registered):
    cell = list(registered.cells(RUNS))[3]
    write_run(cell.run_dir, cell.overrides)
    figure = draw(collect(registered, RUNS))
    assert [line.get_color() for line in figure.axes[0].get_lines()] == ["#0072B2"]


def test_several_numbers_of_workers_are_drawn_as_the_final_metric_against_them(table):
    rows = tuple(row.with_workers(n) for row in table.rows for n in (4, 8))
    several = table.model_copy(update={"rows": rows})
    for cell in several.cells(RUNS):
        workers = cell.row.workers
        accuracy = 90 + workers + 3 * (cell.seed == 1)  # mean over 3 seeds: 91 + workers
        write_run(cell.run_dir, cell.overrides, workers=workers, accuracy=[1.0, accuracy])
    (ax,) = draw_over_workers(collect(several, RUNS)).axes
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 2 and line.get_marker() in ("o", "s")]
    assert [[round(2**x) for x in line.get_xdata()] for line in lines] == [[4, 8], [4, 8]]
    assert [list(line.get_ydata()) for line in lines] == [[95, 99], [95, 99]]
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == ["AllReduce, complete", "AccumAdam, aer"]
    paths = write_figure(collect(several, RUNS), Path("out"))
    assert [path.name for path in paths] == ["small.png", "small.svg"]
    assert "workers" in paths[1].read_text()


def test_without_byte_counts_the_run_is_named(filled, capsys):
    cell = next(filled.cells(RUNS))
    metrics = cell.run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("bytes_sent", "bytes"))
    assert main(["figure=small"]) == 2
    assert f"error: {cell.run_dir}: metrics.jsonl records no 'bytes_sent'" in capsys.readouterr().err
