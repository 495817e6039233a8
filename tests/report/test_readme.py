"""What READMEs show, name and link to."""

import re
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from common.experiments.definitions import ROOT, names_in
from common.experiments.table_file import MOST_SHOWN, TABLES, TableFile
from common.experiments.tables import Table, full_name
from common.launch.compose import compose_config
from common.report.benchmark_tables import BENCHMARKS
from common.report.claims import fill_blocks
from common.report.figures import FIGURES
from scripts.tables import main

RESULTS = ROOT / "results"
MADE = sorted((RESULTS / "tables").glob("*.md"))
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), RESULTS / "HOWTO.md", RESULTS / "speed.md"]


@pytest.mark.parametrize(("readme", "block"), [("README.md", "verdicts"), ("results/README.md", "claims")])
def test_making_the_scoreboard_again_changes_nothing(readme: str, block: str) -> None:
    text = (ROOT / readme).read_text()
    assert f"<!-- table: {block} -->" in text
    assert fill_blocks(text) == text, f"python -m scripts.tables readme={readme}"


def test_the_first_page_of_results_is_short_and_names_every_table() -> None:
    text = (RESULTS / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert [page.stem for page in MADE if f"(tables/{page.name})" not in text] == []


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    kept = string.ascii_lowercase + string.digits + " -_"
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"".join(c for c in heading.lower() if c in kept).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*READMES, *MADE], ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands(readme: Path) -> None:
    text = readme.read_text()
    for module in re.findall(r"python -m ((?:cnn|common|gpt2|scripts|slurm|transformer)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or path.is_dir(), module
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
    for name in re.findall(r"\btable=(\w+)", text):
        assert full_name(name, "table") in names_in(TABLES) + names_in(BENCHMARKS), name
    for name in re.findall(r"\bfigure=(\w+)", text):
        assert full_name(name, "figure") in names_in(TABLES) + names_in(FIGURES), name


def test_the_example_of_a_table_is_one():
    example = re.search(r"```yaml\n(title: .*?)```", (RESULTS / "HOWTO.md").read_text(), re.DOTALL)[1]
    table = Table.of("mine", TableFile.model_validate(yaml.safe_load(example)))
    for cell in table.cells(Path("runs")):
        assert compose_config(table.task, cell.overrides).run_dir.startswith("runs/mine/")


@pytest.mark.parametrize(
    "page",
    [page if page.stem == "table2" else pytest.param(page, marks=pytest.mark.slow) for page in MADE],
    ids=lambda page: page.stem,
)
def test_making_a_table_again_changes_nothing(page: Path) -> None:
    Path("results").mkdir()
    for kept in ("runs", "benchmarks"):
        Path("results", kept).symlink_to(RESULTS / kept)
    arguments = re.search(r"`python -m scripts\.tables (table=\w+ --keep)`", page.read_text())[1]
    assert main(arguments.split()) == 0
    for suffix in (".csv", ".md"):
        file = page.with_suffix(suffix)
        made = Path("results", "tables", file.name).read_text()
        assert made == file.read_text(), f"{file.name}: python -m scripts.tables {arguments}"
    heading = next(line for line in page.read_text().splitlines() if line.startswith("| "))
    assert heading.count("|") <= MOST_SHOWN + 1


@pytest.mark.parametrize(
    ("table", "model", "rates"),
    [("steps_to_target", "small GPT", (25, 100)), ("steps_to_target_digits", "small ResNet", (10, 50, 300))],
)
def test_times_in_findings_are_simulated_steps_times_measured_ones(table: str, model: str, rates: tuple) -> None:
    """Of each speed-up's interval the half in logarithms is the root of the sum of both squared."""
    steps = pd.read_csv(RESULTS / "tables" / f"{table}.csv")
    times = pd.read_csv(RESULTS / "benchmarks" / "step_times.csv").query(f"model == '{model}'")
    text = (RESULTS / "tables" / f"{table}.md").read_text().split("## Findings")[1]
    timed = steps.merge(times, on=["method", "topology"]).groupby(["method", "topology"])
    assert len(timed) == len(steps)
    for (method, topology), rows in timed:
        cells = []
        for row in rows.set_index("mbit_per_s").loc[[*rates]].to_dict("records"):
            middle, low, high = (
                np.log([row[f"steps_to_target_speedup{end}"], row[f"step_speedup{end}"]])
                for end in ("", "_low", "_high")
            )
            ends = np.exp(middle.sum() + np.array([0, -np.hypot(*(middle - low)), np.hypot(*(high - middle))]))
            speedup = "" if np.isnan(ends).any() else "{:.2f} [{:.2f}, {:.2f}]".format(*ends)
            cells += [f"{row['steps_to_target_median'] * row['step_ms'] / 1000:.0f}", speedup]
        assert f"| {method} | {topology} | {' | '.join(cells)} |" in text


@pytest.mark.parametrize("table", ["gpt2_gap", "accumulation_digits", "table2_text_en_de", "schedule_lengths"])
def test_effects_in_findings_are_those_that_their_program_prints(table, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    findings = yaml.safe_load((RESULTS / f"definitions/tables/{table}.yaml").read_text())["findings"]
    exec(re.search(r"```python\n(.*?)```", findings, re.DOTALL)[1], {})
    printed = [line.removesuffix("|") for line in capsys.readouterr().out.splitlines()]
    assert len(printed) >= 5
    assert all(line.startswith(effect) for line, effect in zip(_rows(findings), printed, strict=True))


def _rows(markdown: str) -> list[str]:
    """The lines of the first table, without its head."""
    return [line for line in markdown.splitlines() if line.startswith("|")][2:]


def test_times_of_steps_in_speed_are_those_of_their_records() -> None:
    """Each cell of the tables by engine and topology, by what its column says; "" where nothing was measured."""
    parallel, uneven = (
        pd.read_csv(ROOT / f"results/benchmarks/{name}.csv") for name in ("parallel", "uneven_prediction")
    )
    cells = 0
    for row in _cells((ROOT / "results/speed.md").read_text()):
        same = f"engine == '{row['engine']}' and topology == '{row['topology']}'"
        for column, shown in row.items():
            if layout := re.fullmatch(r"(\d+)x(\d+), (\d+) (ms|Mbit/s)", column):
                hosts, ranks, number, unit = layout.groups()
                ms, rate = (number, 200) if unit == "ms" else (400, number)
                where = f"{same} and hosts == {hosts} and ranks_per_host == {ranks} and model == 'gpt_5m'"
                found = parallel.query(f"{where} and compute_ms == {ms} and mbit_per_s == {rate}")
                expected = [f"{value:.0f}" for value in found["step_ms"]]
            elif column in ("even", "jitter_10", "jitter_30", "slow_host", "stalls"):
                found = uneven.query(f"{same} and condition == '{column}'")
                expected = [f"{r.measured_ms:.0f} ({r.predicted_ms:.0f})" for r in found.itertuples()]
            else:
                continue
            cells += 1
            assert [shown] == expected or (shown == "" and not expected), (
                f"{row['engine']}, {row['topology']}, {column}"
            )
    assert cells > 130


def _cells(markdown: str) -> Iterator[dict[str, str]]:
    """Yield {column: cell} of each row of the tables that have an engine and a topology."""
    columns: list[str] = []
    for line in markdown.splitlines():
        values = [value.strip() for value in line.strip("|").split("|")] if line.startswith("|") else []
        columns = values if "engine" in values and "topology" in values else columns if values else []
        if columns and values != columns and not set(line) <= set("|-: "):
            yield dict(zip(columns, values, strict=True))


def test_a_page_that_is_no_text_is_refused_and_kept(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff")
    assert main([f"readme={page}"]) == 2
    assert f"readme={page}: expected a Markdown file in UTF-8" in capsys.readouterr().err
    assert page.read_bytes() == b"\xff"
    page.write_text("<!-- table: claims -->\nno end")
    assert main([f"readme={page}"]) == 2
    assert f"readme={page}: expected a line `<!-- table: claims -->` or " in capsys.readouterr().err
