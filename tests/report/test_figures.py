import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from omegaconf import OmegaConf

from common.cli import UsageError
from common.experiments.collect import collect
from common.experiments.definitions import ROOT, names_in
from common.experiments.quantities import QUANTITIES
from common.experiments.tables import load_table
from common.launch.compose import compose_config
from common.report.benchmark_tables import load_benchmark
from common.report.curves import curves, draw_table, spread, telling_rows
from common.report.figures import FIGURES, Bars, Curves, Times, draw_over_setting, load_figure, write_figures
from common.report.published import load_published
from scripts.figures import main
from tests.experiments.conftest import CONTENT, make_table
from tests.experiments.synthetic import write_run

RUNS = Path("runs")


@pytest.fixture
def filled(registered):
    for cell in registered.cells(RUNS):
        loss = np.linspace(2.3, 0.1 * cell.seed, 12)
        write_run(cell.run_dir, cell.overrides, train_loss=loss.tolist(), bytes_sent=24_000_000)
    return registered


def test_files_are_made_and_not_blank(filled, capsys):
    assert main(["figure=small", "formats=[png,svg]"]) == 0
    assert "written: runs/report/small.png runs/report/small.svg" in capsys.readouterr().out
    image = imread("runs/report/small.png")
    assert image.shape[:2] == (1120, 2280)
    assert image.std() > 0.05
    assert "validation accuracy" in Path("runs/report/small.svg").read_text()


def test_six_panels_with_a_line_for_each_row(filled):
    figure = draw_table(collect(filled, RUNS))
    assert len(figure.axes) == 6
    for ax in figure.axes:
        assert len(ax.get_lines()) == 2
    colours = {line.get_color() for line in figure.axes[0].get_lines()}
    styles = {line.get_linestyle() for line in figure.axes[0].get_lines()}
    assert len(colours) == len(styles) == 2
    for ax in figure.axes[2::3]:  # names stand at the ends of the lines
        last = {line.get_color(): line.get_xydata()[-1] for line in ax.get_lines()}
        assert {text.get_text() for text in ax.texts} == {"AllReduce, complete", "AccumAdam, aer"}
        assert all(list(text.xy) == pytest.approx(list(last[text.get_color()])) for text in ax.texts)


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([], []),
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.1, 0.5, 0.6, 0.7], [0.1, 0.4, 0.6, 0.8]),
        ([0.0, 0.25, 0.25], [-0.1 / 3, 0.5 / 3, 1.1 / 3]),
    ],
)
def test_names_are_moved_apart_as_little_as_needed(heights, expected):
    assert list(spread(heights, 0.2)) == pytest.approx(expected)


def labels_in(figure):
    """The names at the ends of the lines, as many in both rows of panels."""
    above, below = ({text.get_text() for text in ax.texts} for ax in figure.axes[2::3])
    assert above == below
    return above


@pytest.fixture
def long():
    """Nine rows of eight methods: the baseline is the last and ends worst, the first method has a better row."""
    first = CONTENT["rows"][0]
    methods = ["A", "A", "B", "C", "D", "E", "F", "G", "H"]
    rows = [
        first | {"name": f"r{i}", "method": method, "overrides": [*first["overrides"], f"optimizer.lr={i + 1}"]}
        for i, method in enumerate(methods)
    ]
    rows[0]["topology"] = "aer"
    table = make_table(rows=rows, baseline="r8")
    for cell in table.cells(RUNS):
        place = int(cell.row.name[1:])
        write_run(cell.run_dir, cell.overrides, accuracy=[1.0, 10.0 if place == 8 else 80.0 + place])
    return table


def test_of_many_rows_the_baseline_and_the_best_of_each_method_are_drawn(long):
    collection = collect(long, RUNS)
    assert telling_rows(collection) == ["r1", "r2", "r3", "r4", "r5", "r6", "r8"]
    figure = draw_table(collection)
    assert labels_in(figure) == {f"{method}, complete" for method in "ABCDEFH"}
    assert "(7 of 9 rows, mean of 3 seeds; " in figure.get_suptitle()
    metric = QUANTITIES["accuracy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(QUANTITIES, "accuracy", replace(metric, higher_is_better=False))
        assert telling_rows(collection)[0] == "r0"


def test_rows_that_are_named_are_drawn_as_many_as_there_are(long, monkeypatch, capsys):
    monkeypatch.setattr("scripts.figures.load_table", lambda *_, **__: long)
    figures = []
    monkeypatch.setattr("common.report.figures.save", lambda draw, *_: figures.append(draw()) or [])
    assert main(["figure=small", f"rows={','.join(row.name for row in long.rows)}"]) == 0
    assert [len(ax.get_lines()) for ax in figures[0].axes] == [9] * 6
    assert len(figures[0].legends) == 2
    assert labels_in(figures[0]) == set()
    assert main(["figure=small", "rows=r0,r9"]) == 2
    assert "rows=r9: unknown; expected one of" in capsys.readouterr().err
    assert main(["figure=7", "rows=r0"]) == 2
    assert "rows=r0: expected with a table; figure7.yaml names the figure's rows" in capsys.readouterr().err


def ends_in(ax):
    """The markers of lines of one point, rounded."""
    lines = [line for line in ax.get_lines() if line.get_marker() in tuple("os^") and len(line.get_xydata()) == 1]
    return {tuple(map(float, line.get_xydata()[0].round(2))) for line in lines}


TIMED = "model,method,topology,mbit_per_s,step_ms"


def test_time_to_a_target_is_simulated_steps_times_the_measured_step(tmp_path):
    """Steps of 15 and 30; AccumAdam arrives with one seed of three, on the complete graph not."""
    table = make_table(
        target={"metric": "accuracy", "value": 90, "best": "highest"},
        columns=["method", "topology", "steps_to_target_median"],
    )
    for cell in table.cells(RUNS):
        slow, first = cell.row.name != "allreduce", cell.seed == table.seeds[0]
        accuracy = [95.0, 95.0] if first else [1.0, 2.0] if slow else [1.0, 95.0]
        write_run(cell.run_dir, cell.overrides, accuracy=accuracy)
    rows = ["m,AllReduce,complete,10,100", "m,AllReduce,complete,50,40", "m,AccumAdam,aer,10,20"]
    rows += ["m,half,complete,50,30", "n,AllReduce,complete,10,1"]
    (tmp_path / "step_times.csv").write_text("\n".join([TIMED, *rows, "m,other,aer,10,5"]))
    times = Times(kind="times", title="T", table="t", model="m", also={"allreduce": ["half"]})
    figure = times.drawing(lambda _: collect(table, RUNS), tmp_path).draw()
    slow = figure.axes[0]
    assert [ax.get_title() for ax in figure.axes] == ["10 Mbit/s", "50 Mbit/s"]
    assert [text.get_text() for text in slow.get_yticklabels()] == ["AllReduce, complete", "AccumAdam, aer"]
    drawn = [[list(line.get_xdata()) for line in ax.get_lines()] for ax in figure.axes]
    assert drawn == [
        [pytest.approx([1.5, 3.0]), pytest.approx([3.0])],
        [pytest.approx(x) for x in ([0.45, 0.9], [0.9], [0.6, 1.2], [1.2])],
    ]
    assert [text.get_text() for text in slow.texts] == ["", "1 of 3 seeds"]
    assert "simulated steps x measured time of a step" in figure.axes[1].get_xlabel()

    final = times.drawing(lambda _: collect(make_table(), RUNS), tmp_path).draw()
    assert [ends_in(ax) for ax in final.axes] == [{(3.0, 95.0), (0.6, 33.0)}, {(1.2, 95.0), (0.9, 95.0)}]
    assert "mean of 3 seeds" in final.get_suptitle()
    write_run(cell.run_dir, cell.overrides, accuracy=[1.0, float("nan")])
    final = times.drawing(lambda _: collect(make_table(), RUNS), tmp_path)
    assert ends_in(final.draw().axes[0]) == {(3.0, 95.0)}
    with pytest.raises(UsageError, match="rows=r: unknown"):
        times.model_copy(update={"also": {"r": ["half"]}}).drawing(lambda _: collect(table, RUNS), tmp_path)
    with pytest.raises(UsageError, match="table=t: no finished run"):
        times.drawing(lambda _: collect(table, tmp_path / "none", allow_empty=True), tmp_path)
    with pytest.raises(UsageError, match="model=k: expected one of: m, n"):
        times.model_copy(update={"model": "k"}).drawing(lambda _: collect(table, RUNS), tmp_path)
    with pytest.raises(UsageError, match=r"expected step_times\.csv in there"):
        times.drawing(lambda _: collect(table, RUNS), tmp_path / "none")


def test_labels_tell_lines_of_one_method_and_topology_apart():
    """Two rows of AllReduce on the complete graph differ in `round`; AccumAdam's only row needs no label."""
    first, second = CONTENT["rows"]
    again = first | {"name": "late", "overrides": [*first["overrides"], "optimizer.lr=1"]}
    labels = {"allreduce": {"round": "1"}, "late": {"round": "8"}, "accumadam_aer": {"round": "8"}}
    rows = [row | {"labels": labels[row["name"]]} for row in (first, again, second)]
    table = make_table(rows=rows, labels={"round": "updates"})
    for cell in table.cells(RUNS):
        write_run(cell.run_dir, cell.overrides)
    names = {"AllReduce, round = 1, complete", "AllReduce, round = 8, complete", "AccumAdam, aer"}
    figure = draw_table(collect(table, RUNS))
    assert [len(ax.get_lines()) for ax in figure.axes] == [3] * 6
    assert labels_in(figure) == names


def test_changes_of_workers_are_marked(filled):
    """One of three seeds loses a worker between the evaluations, and gets it back."""
    cell = next(cell for cell in filled.cells(RUNS) if cell.row.method == "AccumAdam")
    with (cell.run_dir / "metrics.jsonl").open("a") as file:
        for step, left, joined in ((18, [2], []), (24, [], [2])):
            file.write(json.dumps({"step": step, "split": "membership", "left": left, "joined": joined}) + "\n")
    marked = [
        {line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"}
        for ax in draw_table(collect(filled, RUNS)).axes
    ]
    assert marked == [set(), set(), {18, 24}] * 2


def test_several_numbers_of_workers_are_drawn_as_the_final_metric_against_them(table):
    rows = tuple(row.with_workers(n) for row in table.rows for n in (4, 8))
    several = table.model_copy(update={"rows": rows})
    for cell in several.cells(RUNS):
        workers = cell.row.workers
        accuracy = 90 + workers + 3 * (cell.seed == 1)  # mean over 3 seeds: 91 + workers
        write_run(cell.run_dir, cell.overrides, workers=workers, accuracy=[1.0, accuracy])
    (ax,) = draw_over_setting(collect(several, RUNS)).axes
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 2 and line.get_marker() in ("o", "s")]
    assert [[round(2**x) for x in line.get_xdata()] for line in lines] == [[4, 8], [4, 8]]
    assert [list(line.get_ydata()) for line in lines] == [[95, 99], [95, 99]]
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == ["AllReduce, complete", "AccumAdam, aer"]
    assert "mean of 3 seeds" in ax.figure.get_suptitle()
    shutil.rmtree(next(several.cells(RUNS)).run_dir)
    (path,) = write_figures(collect(several, RUNS), Path("out"), ["svg"])
    assert "workers" in path.read_text()
    assert "mean of 2-3 seeds" in path.read_text()


def test_a_table_over_a_setting_is_one_picture_with_all_its_variants(monkeypatch) -> None:
    """A tuned one has a second panel with the learning rates."""
    content = {"sweep": {"quantity": "accuracy", "best": "highest", "seeds": [9], "rates": 3, "extensions": 0}}
    rows = [row | {"centre": 0.01} for row in CONTENT["rows"]]
    table = make_table(
        over="training.batch_size",
        variants={f"b{n}": [f"training.batch_size={n}"] for n in (8, 16)},
        rows=rows,
        **content,
    )
    monkeypatch.setattr(type(table), "untuned", None)
    monkeypatch.setattr(type(table), "tuned_overrides", lambda *_: ())
    for cell in table.cells(RUNS):
        batch = int(cell.variant[1:])
        write_run(cell.run_dir, cell.overrides, accuracy=[1.0, 80 + batch])
        config = OmegaConf.load(cell.run_dir / "config.yaml")
        merged = OmegaConf.merge(
            config, {"training": {"batch_size": batch}, "optimizer": {"lr": batch * 0.00566}}
        )  # the mean of three of one differs from it
        OmegaConf.save(merged, cell.run_dir / "config.yaml")
    figure = draw_over_setting(collect(table, RUNS))
    for ax, values in zip(figure.axes, ([88, 96], [8 * 0.00566, 16 * 0.00566]), strict=True):
        lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 2 and line.get_marker() in ("o", "s")]
        assert [[round(2**x) for x in line.get_xdata()] for line in lines] == [[8, 16], [8, 16]]
        assert [line.get_ydata() for line in lines] == [pytest.approx(values)] * 2
    assert "mean of 3 seeds" in figure.get_suptitle()
    assert [path.name for path in write_figures(collect(table, RUNS), Path("out"))] == ["small.png"]


@pytest.mark.parametrize("decays", [(0, 0.1, 0.3), (0.1, 0.2, 0.4)])
def test_a_setting_of_zero_is_drawn_and_variants_that_share_it_have_lines(decays) -> None:
    first = CONTENT["rows"][0]
    rows = [
        first | {"name": f"r{i}", "overrides": [f"optimizer.weight_decay={decay}"], "labels": {"decay": str(decay)}}
        for i, decay in enumerate(decays)
    ]
    variants = {"easy": ["data=digits"], "hard": ["data=other"]}
    table = make_table(over="optimizer.weight_decay", variants=variants, rows=rows, labels={"decay": "weight decay"})
    settings = dict(zip(table.rows, decays, strict=True))
    for cell in table.cells(RUNS):
        file = write_run(cell.run_dir, cell.overrides, accuracy=[80 + 10 * (cell.variant == "easy")]) / "config.yaml"
        config = {"workers": {"kind": "simulated"}, "optimizer": {"weight_decay": settings[cell.row]}}
        file.write_text(json.dumps(config))
    (ax,) = draw_over_setting(collect(table, RUNS)).axes
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 3 and line.get_marker() in ("o", "s")]
    assert [set(line.get_ydata()) for line in lines] == [{90}, {80}]
    middle = np.mean([line.get_xdata() for line in lines], axis=0)
    assert middle == pytest.approx(np.array(decays) if decays[0] == 0 else np.log2(decays))
    assert [text.get_text() for text in ax.get_xticklabels()] == [f"{decay:g}" for decay in decays]
    names = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert names == ["AllReduce, complete, easy", "AllReduce, complete, hard"]
    file.write_text(json.dumps(config | {"optimizer": {"weight_decay": [0.9, 0.9]}}))
    with pytest.raises(UsageError, match=r"over=optimizer\.weight_decay: \[0\.9, 0\.9\] in runs/small/r2/hard/seed_3"):
        draw_over_setting(collect(table, RUNS))


def without(cell, metric):
    """The run no longer records a metric."""
    metrics = cell.run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(metric, "something"))


def test_a_run_that_cannot_be_drawn_is_named_and_left_out(filled, caplog):
    first, *others = list(filled.cells(RUNS))[:3]
    without(first, "bytes_sent")
    assert main(["figure=small", "formats=svg"]) == 0
    assert f"train_loss: {first.run_dir}: metrics.jsonl records no 'bytes_sent'" in caplog.text
    assert "mean of 2-3 seeds" in Path("runs/report/small.svg").read_text()
    data = curves(collect(filled, RUNS), "train_loss")
    assert set(data["run"][data["method"] == "AllReduce"]) == {str(cell.run_dir) for cell in others}


def test_a_metric_that_no_run_records_is_said_to_be_missing(filled, caplog):
    for cell in filled.cells(RUNS):
        without(cell, "bytes_sent")
    figure = draw_table(collect(filled, RUNS))
    assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [["not recorded"]] * 6


@pytest.mark.parametrize(("sent", "scale"), [(24_000_000, "linear"), (2_000_000, "log")])
def test_bytes_that_differ_much_are_on_a_logarithmic_axis(filled, sent, scale):
    for cell in filled.cells(RUNS):
        if cell.row.name != "allreduce":
            shutil.rmtree(cell.run_dir)
            write_run(cell.run_dir, cell.overrides, train_loss=[2.0] * 12, bytes_sent=sent)
    assert [ax.get_xscale() for ax in draw_table(collect(filled, RUNS)).axes] == [scale, "linear", "linear"] * 2


def test_a_curve_ends_where_a_seed_diverges(filled, caplog):
    """A mean of the seeds that survive would look better than the method is."""
    cell = next(filled.cells(RUNS))
    write_run(cell.run_dir, cell.overrides, train_loss=[2.0, 1.0, float("nan")], accuracy=[50.0, float("inf")])
    collection = collect(filled, RUNS)
    data = curves(collection, "accuracy")
    assert data.dropna()["step"].groupby(data["method"]).max().to_dict() == {"AllReduce": 15, "AccumAdam": 30}
    assert f"{cell.run_dir}: accuracy is not finite from step 30 on" in caplog.text
    allreduce, accumadam = draw_table(collection).axes[5].get_lines()
    assert (list(allreduce.get_xdata()), list(accumadam.get_xdata())) == ([15], [15, 30])


@pytest.mark.parametrize("name", names_in(FIGURES))
def test_every_figure_file_names_what_there_is(name):
    figure = load_figure(name)
    if isinstance(figure, Bars):
        assert figure.value in load_benchmark(figure.table).values
        return
    table = load_table(figure.table)
    if isinstance(figure, Times):
        times = pd.read_csv(ROOT / "results/benchmarks/step_times.csv").query(f"model == '{figure.model}'")
        timed = set(zip(times["method"], times["topology"], strict=True))
        methods = [(method, row) for row in table.rows for method in (row.method, *figure.also.get(row.name, ()))]
        assert {(method, row.topology) for method, row in methods} <= timed
        return
    assert set(figure.rows) <= {row.name for row in table.rows}
    if not figure.published:
        return
    assert figure.variant in (table.variants or {None})
    published = load_published(figure.published)
    assert set(figure.metrics) <= set(published.axes) <= set(published.read_curves())
    for row in figure.rows:
        settings = next(cell.settings for cell in table.cells(RUNS) if cell.row.name == row)
        config = compose_config(table.task, list(settings))
        for metric in figure.metrics.values():
            assert metric not in ("bleu", "meteor") or config.decoding.in_training
            assert not metric.startswith("test_") or config.evaluation.models_kept >= 24  # one for each epoch


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{kind: pie, title: T, table: table2}", "kind=pie: expected one of: bars, curves, times"),
        ("{kind: bars, title: T, table: figure6, value: step_ms}", "axis=...: missing; expected a value"),
        ("{kind: curves, title: T, table: t, published: figure7}", "expected published with metrics"),
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


def panels_of(figure, collection):
    """The panels of a figure of this table's runs."""
    return figure.drawing(lambda _: collection, Path("none")).draw().axes


FIGURE7 = Curves(kind="curves", title="F", table="t", rows=NAMES, metrics={"bleu": "bleu"}, published="figure7")


def test_published_curves_alone(translation):
    collection = collect(translation, RUNS, allow_empty=True)
    (ax,) = panels_of(FIGURE7, collection)
    ends = {round(float(line.get_xdata()[-1]), 2) for line in ax.get_lines() if len(line.get_xdata()) == 24}
    assert ends == {26.76, 10.95}  # all-reduce and AccumAdam on the alternating exponential ring, in ks


@pytest.mark.parametrize("kind", ["processes", "simulated"])
def test_ours_below_the_published_curves(translation, kind):
    """10 ms a step, 30 steps: 0.3 s; simulated workers have no time of their own, but a predicted one."""
    for cell in translation.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, metrics={"bleu": 20.0}, kind=kind, train_loss=[2.0, 1.0])
    collection = collect(translation, RUNS)
    above, below = panels_of(FIGURE7, collection)
    assert above.get_title() == "published (digitised)"
    predicted = "predicted for\n260 MB, 25 Gbit/s, 60 ms of compute"  # of the model that the prediction assumes
    assert below.get_xlabel() == f"time (s), {'measured' if kind == 'processes' else predicted}"
    run = collection.all_runs[0]
    seconds = 0.3 if kind == "processes" else 30 * QUANTITIES["predicted_step_ms"].of(run) / 1000
    assert [line.get_xdata()[-1] for line in below.get_lines()] == pytest.approx([seconds] * 2)


def test_figure_7_compares_what_the_authors_code_computes(translation, caplog):
    """BLEU and METEOR of newstest2014 by every epoch's model, and the smoothed loss of held-out lines."""
    config = compose_config("transformer", ["experiment=table2/allreduce"])
    assert (config.data.validation, config.label_smoothing, config.smoothed_over) == ("held_out", 0.1, "all_tokens")
    figure = load_figure("figure7").model_copy(update={"rows": NAMES, "variant": None})
    for cell in translation.cells(RUNS):
        write_run(cell.run_dir, cell.overrides, metrics={"loss_smoothed": 3.0, "bleu": 1.0}, kind="processes")
        scores = cell.run_dir / "evaluation" / "test.csv"
        scores.parent.mkdir()
        rows = ["model,step,bleu,paper_bleu,paper_meteor", "step_00000030,30,9,27,.5", "step_00000015,15,9,20,.4"]
        scores.write_text("\n".join([*rows, "best,15,9,99,.9", "last,30,9,27,.5"]))
    axes = panels_of(figure, collect(translation, RUNS))
    assert [ax.get_ylabel() for ax in axes] == [
        *("newstest2014: BLEU (HF), %", "newstest2014: METEOR (nltk)"),
        *("held-out lines: smoothed loss (nats)", "test BLEU (HF), %", "test METEOR (nltk)"),
        "validation loss, smoothed (nats)",
    ]
    drawn = [list(ax.get_lines()[0].get_ydata()) for ax in axes[3:]]
    assert np.array(drawn) == pytest.approx(np.array([[20, 27], [0.4, 0.5], [3, 3]]))
    assert len(axes[1].get_lines()[0].get_ydata()) == 24
