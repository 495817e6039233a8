"""What results/README.md repeats of the tables is what they hold."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

from common.report.benchmark import read_record
from common.report.definitions import ROOT
from common.report.published import load_published
from common.report.registry import table_names
from common.report.runs import read_run
from common.report.significance import welch
from scripts import tables

README = (ROOT / "results" / "README.md").read_text()


def discussion(name: str) -> str:
    return README.split(f"<!-- discussion: {name} -->")[1].split("<!-- end -->")[0]


def cells(name: str, which: int = 0) -> list[list[str]]:
    """The rows of the discussion's tables, of one of them."""
    blocks = [block for block in discussion(name).split("\n\n") if block.startswith("| ")]
    return [split(line) for line in blocks[which].splitlines()[2:]]


def split(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text)]


def with_spread(row: pd.Series) -> str:
    return f"{row['top1_mean']:.2f} ± {row['top1_2sigma']:.2f}"


def check_p(shown: str, p: float) -> None:
    """To as many digits as are shown."""
    if pd.isna(p):
        assert shown == ""
    else:
        assert float(shown) == round(p, len(shown.split(".")[1]))


def finals(table: str, row: str, metric: str) -> list[float]:
    """The last value of every kept seed."""
    folders = sorted((ROOT / "results" / "runs" / table / row).glob("seed_*"))
    return [read_run(folder).last("validation", metric) for folder in folders]


def test_every_proxy_has_a_place() -> None:
    for name in table_names():
        if name.endswith("_proxy") or name in ("ablation", "topologies"):
            assert discussion(name)


def test_table3() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "table3_proxy.csv")
    published = load_published("table3").rows
    for (_, row), there, shown in zip(ours.iterrows(), published, cells("table3_proxy"), strict=True):
        values = there.values
        assert shown[2] == f"{values['top1'].value:.2f} / {values['train_loss'].value:.3f}"
        assert shown[3:5] == [with_spread(row), f"{row['train_loss_mean']:.3f}"]
        assert shown[0] == row["method"]
        check_p(shown[5], row["top1_p_value"])


def test_exponential_graphs() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "exponential_proxy.csv")
    published = {row.name: row.values["top1"].value for row in load_published("exponential").rows}
    topologies = list(dict.fromkeys(re.sub(r"_\d+$", "", name) for name in published))
    for topology, shown in zip(topologies, cells("exponential_proxy"), strict=True):
        there = [published[f"{topology}_{n}"] for n in (4, 8, 16, 32)]
        assert shown[1] == ("unknown" if None in there else " / ".join(f"{value:.2f}" for value in there))
        label = "complete" if topology == "parallel_sgd" else topology
        rows = ours[ours["topology"] == label].set_index("workers")
        assert shown[2] == " / ".join(f"{rows.loc[n, 'top1_mean']:.2f}" for n in (4, 8, 16))
        assert shown[3] == with_spread(rows.loc[32])
        check_p(shown[4], rows.loc[32, "top1_p_value"])


def test_table2() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "table2_proxy.csv")
    published = load_published("table2").rows
    for (_, row), there, shown in zip(ours.iterrows(), published, cells("table2_proxy"), strict=True):
        assert (shown[0], shown[1].lower()) == (row["method"], row["topology"])
        both = [there.values[f"{pair}_bleu"].value for pair in ("en_de", "en_fr")]
        assert shown[2] == " / ".join(f"{value:.2f}" for value in both)
        for pair, value, p in (("en_de", shown[3], shown[5]), ("en_fr", shown[4], shown[6])):
            assert value == f"{row[f'{pair}_bleu_mean']:.2f} ± {row[f'{pair}_bleu_2sigma']:.2f}"
            expected = row[f"{pair}_bleu_p_value"]
            assert p == ("" if pd.isna(expected) else f"{expected:.2g}")


def test_gpt2() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "gpt2_proxy.csv")
    for (_, row), shown in zip(ours.iterrows(), cells("gpt2_proxy"), strict=True):
        assert shown[:2] == [row["method"], row["topology"]]
        assert shown[2] == f"{row['validation_loss_mean']:.3f} ± {row['validation_loss_2sigma']:.3f}"
        assert shown[3:5] == [f"{row['train_loss_mean']:.3f}", f"{row['consensus_distance_mean']:.3f}"]
        expected = row["validation_loss_p_value"]
        assert shown[5] == ("" if pd.isna(expected) else f"{expected:.2g}")
    assert f"unigram entropy of {ours['unigram_entropy'].iloc[0]:.3f}" in discussion("gpt2_proxy")


def test_sparse_and_complete_topologies_within_a_seed() -> None:
    for method, en_de, p_en_de, en_fr, p_en_fr in cells("table2_proxy", 1):
        for pair, shown, p in (("en_de", en_de, p_en_de), ("en_fr", en_fr, p_en_fr)):
            aer, complete = (
                np.array(finals("table2_proxy", f"{method.lower()}_{topology}/{pair}", "bleu"))
                for topology in ("aer", "complete")
            )
            assert numbers(shown) == list((aer - complete).round(2))
            check_p(p, ttest_1samp(aer - complete, 0).pvalue)


def test_accumulation_against_none() -> None:
    shown = re.search(r"above DAdam \(p (\S+) on AER, (\S+) on the complete graph", discussion("table3_proxy")).groups()
    for topology, p in zip(("aer", "complete"), shown, strict=True):
        rows = [finals("table3_proxy", f"{method}_{topology}", "accuracy") for method in ("accumadam", "dadam")]
        check_p(p, welch(*rows))


def at_a_glance(label: str) -> str:
    """The result of one row of the top page."""
    top = (ROOT / "README.md").read_text().split("## Results at a glance")[1].split("\n## ")[0]
    (row,) = [split(line) for line in top.splitlines() if line.startswith(f"| [{label}](")]
    return row[2]


def test_the_top_page_at_a_glance(tmp_path: Path) -> None:
    names = ("table3_proxy", "table2_proxy", "exponential_proxy")
    table3, table2, exponential = (pd.read_csv(ROOT / "results" / "tables" / f"{n}.csv") for n in names)
    # From the runs that are kept: `make quickstart` puts one's own into results/tables.
    assert tables.main(["table=quickstart", f"runs={ROOT / 'results' / 'runs'}", f"output={tmp_path}"]) == 0
    quickstart = pd.read_csv(tmp_path / "quickstart.csv")
    accuracy = table3.set_index(["method", "topology"])["top1_mean"].round(1)
    rows = [(method, topology) for method in ("AccumAdam", "DAdam") for topology in ("aer", "complete")]
    assert numbers(at_a_glance("Table 3")) == [*accuracy[rows], accuracy["AllReduce", "complete"]]
    assert numbers(at_a_glance("Table 2")) == list(table2[["en_de_bleu_mean", "en_fr_bleu_mean"]].round(1).stack())
    losses = pd.read_csv(ROOT / "results" / "tables" / "gpt2_proxy.csv").set_index(["method", "topology"])
    rows = [("AllReduce", "complete"), *((m, t) for m in ("DAdam", "AccumAdam") for t in ("aer", "complete"))]
    expected = [*losses["validation_loss_mean"][rows].round(2), losses["unigram_entropy"].iloc[0].round(2)]
    assert numbers(at_a_glance("GPT-2")) == expected
    at_32 = exponential[exponential["workers"] == 32].set_index("topology")["top1_mean"].round(1)
    assert numbers(at_a_glance("topologies")) == list(at_32[["ring", "complete", "one_peer_exponential"]])
    gossip, shown = quickstart[1:]["accuracy_mean"].round(1), at_a_glance("quickstart")
    assert numbers(shown) == [quickstart["accuracy_mean"].round(1)[0], gossip.min(), gossip.max()]
    sent = quickstart["bytes_per_step"]
    saved = (100 * (1 - sent[sent < sent[0]] / sent[0])).round()
    assert f"{saved.min():.0f} to {saved.max():.0f} % fewer bytes" in shown


def test_the_benchmarks_on_the_top_page() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    loop, translate = (pd.read_csv(ROOT / "results" / "benchmarks" / f"{name}.csv") for name in ("loop", "translate"))
    assert f"costs at most {100 * (loop['ratio_to_bare'].max() - 1):.1f} % over a bare one" in text
    optimizer = benchmark("optimizer").query("optimizer == 'AccumAdamW' and engine == 'ours fused'")
    assert f"takes at most {optimizer['ratio_to_decent_dp'].max():.2f} of the time of decent-dp's" in text
    taken = 1 / translate["speedup"]
    assert f"takes {taken.min():.1f} to {taken.max():.2f} of fairseq's time" in text


def test_ablation() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "ablation.csv")
    for (_, row), shown in zip(ours.iterrows(), cells("ablation"), strict=True):
        assert shown[:3] == [row["method"], row["overlap"], row["accumulation"]]
        assert shown[3] == with_spread(row)
        assert shown[4] == f"{row['train_loss_mean']:.3f} ± {row['train_loss_2sigma']:.3f}"
        assert shown[5] == f"{row['predicted_step_ms']:.0f}"
        assert shown[6] == ("" if pd.isna(row["train_loss_p_value"]) else f"{row['train_loss_p_value']:.2g}")


def test_topologies() -> None:
    ours = pd.read_csv(ROOT / "results" / "tables" / "topologies.csv")
    labels = ours["topology"].where(~ours["method"].str.startswith("AllReduce"), "all-reduce")
    shown = {row[0]: row[1:] for row in cells("topologies")}
    assert list(shown) == list(labels.unique())
    for label, rows in ours.groupby(labels):
        at = rows.set_index("workers")
        means, own = ([round(at[name][n], 1) for n in (8, 16, 32)] for name in ("top1_mean", "local_top1_mean"))
        assert (numbers(shown[label][0]), numbers(shown[label][2])) == (means, own)
        last = at.loc[32]
        assert shown[label][1] == f"{last['top1_2sigma']:.1f}"
        assert shown[label][3:5] == [f"{last['consensus_distance_mean']:.3f}", f"{last['spectral_gap']:.3f}"]
        assert shown[label][5] == f"{last['predicted_step_ms']:.0f}"


def benchmark(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "results" / "benchmarks" / f"{name}.csv")


def test_measured_times_of_the_ablation() -> None:
    step_ms = benchmark("ablation").set_index("method")["step_ms"]
    shown = re.search(r"(\d+) of (\d+) ms off gossip's step and (\d+) of (\d+) off all", discussion("ablation")[900:])
    expected = []
    for method in ("Decent (AER)", "AllReduce"):
        without = step_ms[f"{method}, no overlap"]
        expected += [round(without - step_ms[method]), round(without)]
    assert list(map(int, shown.groups())) == expected
    for method in step_ms.index[~step_ms.index.str.endswith("accumulated")]:
        assert abs(step_ms[f"{method}, accumulated"] / step_ms[method] - 1) < 0.015


def test_time_of_a_step() -> None:
    measured = benchmark("parallel").query("model == 'gpt_5m' and mbit_per_s == 200")
    measured = measured.set_index(["engine", "topology", "hosts", "ranks_per_host", "compute_ms"]).sort_index()
    engines = {"DDP": "ddp", "decent-dp": "decent_dp", "ours, torch's AdamW": "ours_torch"}
    at = [(8, 1, 400), (8, 1, 1200), (4, 2, 400), (4, 2, 1200)]
    for engine, topology, *shown in cells("benchmarks"):
        case = engines.get(engine, engine), topology
        for where, step_ms in zip(at, shown, strict=False):
            known = (*case, *where) in measured.index
            assert step_ms == (f"{measured.step_ms[(*case, *where)]:.0f}" if known else "")
        for where, payloads in zip((at[0], at[2]), shown[4].split("/"), strict=True):
            if (*case, *where) in measured.index:
                row = measured.loc[(*case, *where)]
                assert payloads.strip() == f"{row.bytes_per_host / row.payload_mb / 1e6:.2f}"
    text = " ".join(discussion("benchmarks").split())
    staggered = measured.loc[("ours", "aer/staggered", 4, 2, 400)]
    ratios = (
        f"takes {staggered.ratio_to_decent_dp:.2f} of the time of decent-dp's AER and {staggered.ratio_to_ddp:.2f} of"
    )
    assert ratios in text
    between = measured.loc[("ours", "one_peer_exponential/between_hosts", 4, 2, 400)]
    missed = (
        f"3.5 times as fast as DDP ({1 / staggered.ratio_to_ddp:.2f} here) and 0.75 of the time of decent-dp's "
        f"one-peer exponential graph ({between.ratio_to_decent_dp:.2f} between hosts)"
    )
    assert missed in text
    at_1200 = measured.loc[("ours", ["aer", "aer/staggered"], 4, 2, 1200), :]
    aligned, staggered = (100 * at_1200.exposed_ms / at_1200.step_ms).round(1)
    assert f"exposed for {staggered} % of the step (with aligned phases {aligned} %)" in text
    errors = benchmark("parallel_prediction").query("model == 'gpt_5m' and mbit_per_s == 200")["error_percent"].abs()
    assert f"median error of {errors.median():.1f} % (at most {errors.max():.0f} %" in text


def test_memory_and_start() -> None:
    findings = read_record(ROOT / "results" / "benchmarks" / "parallel.md").findings
    text = " ".join(discussion("benchmarks").split())

    def ratios(place: str) -> list[str]:
        lines = (
            re.compile(rf"{place}, \w+: {what}, median to median ([.\d]+), aim")
            for what in ("peak memory", "start", "ready")
        )
        found = [match[1] for line in lines for match in map(line.match, findings) if match]
        return [f"{float(ratio):.2f}" for ratio in found]

    for engine, words in {"ours": "Of decent-dp's this engine takes", "ours_torch": "with torch's optimizer"}.items():
        memory, start, ready = ratios(f"gpt_5m on 4x2, {engine}")
        expected = f"{words} {memory} of the memory, {start} of the time to start, {ready} until steps take their usual"
        assert expected in text
    elsewhere = {
        "gpt_5m on 8x1": "On 8 hosts of one it takes",
        "gpt_5m on 16x1": "on 16 of them",
        "digits_resnet on 4x2": "with the small digits' ResNet",
    }
    for place, words in elsewhere.items():
        memory, start, ready = ratios(f"{place}, ours")
        assert f"{words} {memory}, {start} and {ready}" in text


def test_other_rates_and_sixteen_processes() -> None:
    names = {"DDP": "ddp", "decent-dp": "decent_dp", "ours, torch's AdamW": "ours_torch"}
    measured = benchmark("parallel").query("model == 'gpt_5m' and compute_ms == 400")
    step_ms = measured.set_index(["engine", "topology", "hosts", "ranks_per_host", "mbit_per_s"])["step_ms"]
    columns = [*((*layout, rate) for layout in ((4, 2), (8, 1)) for rate in (100, 200, 1000)), (16, 1, 200)]
    shown = {
        (names.get(row[0], row[0]), row[1], *at): ms
        for row in cells("benchmarks", 1)
        for at, ms in zip(columns, row[2:], strict=True)
    }
    assert {at: ms for at, ms in shown.items() if ms} == {at: f"{step_ms[at]:.0f}" for at in shown if at in step_ms}
    of_first_table = [(4, 2, 200), (8, 1, 200)]
    assert set(step_ms.index) <= {at for at in step_ms.index if at[2:] in of_first_table} | set(shown)


def test_speed_on_the_top_page() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    rows = benchmark("parallel").query("model == 'gpt_5m' and mbit_per_s == 200 and hosts == 4 and compute_ms == 400")
    seconds = rows.set_index(["engine", "topology"])["step_ms"] / 1000
    ours, peer = seconds["ours", "aer/staggered"], seconds["decent_dp", "alternating-exp-ring"]
    shown = f"DDP takes {seconds['ddp', 'complete']:.2f} s a step, decent-dp {peer:.2f} and this engine {ours:.2f}"
    assert shown in text
    assert f"computing alone takes {seconds['alone', 'torch']:.2f}" in text
    errors = benchmark("parallel_prediction")["error_percent"].abs()
    assert f"median error is {errors.median():.1f} %" in text


def test_table1_and_figure6_on_emulated_hosts() -> None:
    averaging = benchmark("communication").set_index(["topology", "hosts"])["seconds_per_iteration"]
    for topology, *shown in cells("benchmarks", 2):
        for hosts, (seconds, ratio) in zip((4, 8), (shown[:2], shown[2:]), strict=True):
            if (topology, hosts) in averaging:
                expected = averaging[topology, hosts], averaging[topology, hosts] / averaging["allreduce", hosts]
                assert [seconds, ratio] == [f"{value:.2f}" for value in expected]
            else:
                assert seconds == ratio == ""
    scaling = benchmark("scaling").set_index(["method", "workers"])["step_ms"]
    for method, *shown in cells("benchmarks", 3):
        for workers, cell in zip((4, 8, 16), shown, strict=True):
            ms = scaling[method, workers]
            assert cell == f"{ms:.0f} ({ms / scaling['AllReduce', workers]:.2f})"
