from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from common.report.cli import UsageError
from common.report.collect import collect
from common.report.columns import value_of
from common.report.drawing import save
from common.report.figure_files import Bars, Curves, figure_names, load_figure
from common.report.figures import curves, draw, draw_over_workers, write_figure
from common.report.measured import load_benchmark
from common.report.published import load_published
from common.report.registry import load_table
from common.report.time_curves import draw_time_curves
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
    assert image.shape[:2] == (1120, 1920)
    assert image.std() > 0.05
    assert "validation accuracy" in Path("results/figures/small.svg").read_text()


def test_a_large_svg_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("common.report.drawing.LARGEST_SVG_BYTES", 10)
    (tmp_path / "f.svg").write_text("of yesterday")
    save(lambda: Figure(figsize=(1, 1)), tmp_path, "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_curves_are_against_steps_and_megabytes_per_worker(filled):
    data = curves(collect(filled, RUNS), "accuracy")
    row = data[data["method"] == "AllReduce"]
    assert sorted(set(row["step"])) == [15, 30]
    assert sorted(set(row["sent_mb"])) == pytest.approx([3.0, 6.0])  # 24 MB of 4 workers
    assert len(row) == 2 * 3  # evaluations x seeds


def test_six_panels_with_a_line_for_each_row(filled):
    figure = draw(collect(filled, RUNS))
    assert len(figure.axes) == 6
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


@pytest.mark.parametrize("name", figure_names())
def test_every_figure_file_names_what_there_is(name):
    figure = load_figure(name)
    if isinstance(figure, Bars):
        assert figure.value in load_benchmark(figure.table).values
        return
    table = load_table(figure.table)
    assert set(figure.rows) <= {row.name for row in table.rows}
    assert figure.variant in (table.variants or {None})
    assert set(figure.metrics) <= set(load_published(figure.published).read_curves())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{kind: pie, title: T, table: table2}", "kind=pie: expected one of: bars, curves"),
        ("{kind: bars, title: T, table: figure6, value: step_ms}", "axis=...: missing; expected a value"),
        ("{kind: [", "not valid YAML"),
    ],
)
def test_a_wrong_figure_file_is_refused(tmp_path, content, message):
    (tmp_path / "small.yaml").write_text(content)
    with pytest.raises(UsageError, match=r"^small\.yaml: ") as caught:
        load_figure("small", tmp_path)
    assert message in str(caught.value)


@pytest.fixture
def translation(table):
    """Rows called as in Figure 7."""
    rows = tuple(row.model_copy(update={"name": name}) for row, name in zip(table.rows, NAMES, strict=True))
    return table.model_copy(update={"rows": rows})


NAMES = ("allreduce", "accumadam_aer")
FIGURE7 = Curves(kind="curves", title="F", table="t", rows=NAMES, metrics=("bleu",), published="figure7")


def test_published_curves_alone(translation):
    collection = collect(translation, RUNS, allow_empty=True)
    (ax,) = draw_time_curves(FIGURE7, collection).axes
    ends = {round(float(line.get_xdata()[-1]), 2) for line in ax.get_lines() if len(line.get_xdata()) == 24}
    assert ends == {26.76, 10.95}  # all-reduce and AccumAdam on the alternating exponential ring, in ks


@pytest.mark.parametrize("kind", ["processes", "simulated"])
def test_ours_below_the_published_curves(translation, kind):
    """10 ms a step, 30 steps: 0.3 s; simulated workers have no time of their own, but a predicted one."""
    for cell in translation.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, metrics={"bleu": 20.0}, kind=kind, train_loss=[2.0, 1.0])
    collection = collect(translation, RUNS)
    above, below = draw_time_curves(FIGURE7, collection).axes
    assert above.get_title() == "published (digitised)"
    assert below.get_xlabel() == f"time (s), {'measured' if kind == 'processes' else 'predicted'}"
    run = collection.all_runs[0]
    seconds = 0.3 if kind == "processes" else 30 * value_of("predicted_step_ms", [run]) / 1000
    assert [line.get_xdata()[-1] for line in below.get_lines()] == pytest.approx([seconds] * 2)


def test_figure_7_by_its_number(capsys):
    assert main(["figure=7", "output=out"]) == 0
    out = capsys.readouterr().out
    assert "missing: allreduce en_de seed 810975: not run yet: python -m transformer.train" in out
    assert "en_fr" not in out
    assert "dadam" not in out
    assert Path("out/figure7.svg").exists()
