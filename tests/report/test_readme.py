"""What READMEs show, name and link to."""

import re
import string
from pathlib import Path

import pytest
import yaml

from common.experiments.definitions import ROOT, names_in
from common.experiments.table_file import TableFile
from common.experiments.tables import Table, full_name, table_names
from common.launch.compose import compose_config
from common.report.benchmark_tables import benchmark_names
from common.report.excerpts import BLOCK, EXCERPTS, SCOREBOARD, fill_tables
from common.report.figures import figure_names
from scripts.tables import main

READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))]
GENERATED = [ROOT / "README.md", ROOT / "results" / "README.md"]


@pytest.mark.parametrize(
    "readme", [GENERATED[0], pytest.param(GENERATED[1], marks=pytest.mark.slow)], ids=["top", "results"]
)
def test_making_the_tables_again_changes_nothing(readme: Path) -> None:
    text = readme.read_text()
    assert fill_tables(text) == text, f"python -m scripts.tables readme={readme.relative_to(ROOT)}"


def test_every_excerpt_is_shown() -> None:
    shown = {match["name"] for readme in GENERATED for match in BLOCK.finditer(readme.read_text())}
    assert shown == {*names_in(EXCERPTS), *SCOREBOARD}


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    kept = string.ascii_lowercase + string.digits + " -_"
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"".join(c for c in heading.lower() if c in kept).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_commands(readme: Path) -> None:
    text = readme.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (readme.parent / file).resolve() if file else readme
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link
    for module in re.findall(r"python -m ((?:cnn|common|gpt2|scripts|slurm|transformer)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or path.is_dir(), module
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
    for name in re.findall(r"\btable=(\w+)", text):
        assert full_name(name, "table") in (*table_names(), *benchmark_names()), name
    for name in re.findall(r"\bfigure=(\w+)", text):
        assert full_name(name, "figure") in (*table_names(), *figure_names()), name


def test_the_example_of_a_table_is_one():
    example = re.search(r"```yaml\n(title: .*?)```", GENERATED[1].read_text(), re.DOTALL)[1]
    table = Table.of("mine", TableFile.model_validate(yaml.safe_load(example)))
    for cell in table.cells(Path("runs")):
        assert compose_config(table.task, cell.overrides).run_dir.startswith("runs/mine/")


MADE = sorted((ROOT / "results" / "tables").glob("*.md"))


@pytest.mark.parametrize(
    "page",
    [page if page.stem == "table2" else pytest.param(page, marks=pytest.mark.slow) for page in MADE],
    ids=lambda page: page.stem,
)
def test_making_a_table_again_changes_nothing(page: Path) -> None:
    if (ROOT / "runs" / page.stem).exists():  # as after `make quickstart`
        pytest.skip("the table may have been made from runs of this checkout, not from the kept ones")
    Path("results").mkdir()
    for kept in ("runs", "benchmarks"):
        Path("results", kept).symlink_to(ROOT / "results" / kept)
    argument = re.search(r"`python -m scripts\.tables (table=\w+)`", page.read_text())[1]
    assert main([argument]) == 0
    for suffix in (".csv", ".md"):
        file = page.with_suffix(suffix)
        made = Path("runs", "report", file.name).read_text()
        assert made == file.read_text(), f"{file.name}: python -m scripts.tables {argument}"


def test_a_page_that_is_no_text_is_refused_and_kept(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff")
    assert main([f"readme={page}"]) == 2
    assert f"readme={page}: expected a Markdown file in UTF-8" in capsys.readouterr().err
    assert page.read_bytes() == b"\xff"
