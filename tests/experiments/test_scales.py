"""Every table of the papers at the paper's scale and as a proxy: what its file names exists and composes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.config.base import is_bookkeeping
from common.config.config import Config
from common.config.overrides import flatten
from common.experiments.definitions import ROOT, names_in
from common.experiments.runs import read_pack
from common.experiments.table_file import PAPER, TABLES, Row
from common.experiments.tables import Table, load_table
from common.launch.compose import compose_config
from common.parallel.gossip.buckets import AUTO_MB
from common.report.benchmark_tables import BENCHMARKS, load_benchmark
from common.report.figures import FIGURES, load_figure
from common.report.published import load_published, published_values

RUNS = ROOT / "results" / "runs"
KEPT = {path.name for path in RUNS.iterdir()}  # tables
SHORT = ("quickstart", "transformer_4_gpus", "gpt2")  # a table of each task that has few rows
# Files of results/paper, and why nothing here makes their numbers.
WITHOUT_RECIPE = {
    "allreduce_baselines": "the author's own runs on 4 GPUs, not of the paper",
    "exponential_other_models": "neither values nor protocols are known",
    "gap_by_horizon": "a later study of the first author, with another model and other data",
    "utilisation": "link rates that others simulate and measure, beside predicted ones",
    "gpt2_log": "which method this one run had is not stated",
}
WITHOUT_PROXY = {
    "exponential_cifar10": "the proxy of the ImageNet table compares the same topologies",
    "exponential_methods": "the table heterogeneous_fair compares the methods; small networks cannot stand for these",
    "figure6": "times of steps: benchmarks on emulated hosts stand for them",
    "transformer_4_gpus": "the proxy of table2 compares the same methods",
}


read_table = cache(load_table)  # in tests: it takes time, and all processes of `pytest -n` collect all tests


def tables() -> list[Table]:
    return [read_table(name) for name in names_in(TABLES)]


def proxies() -> list[Table]:
    return [table for table in tables() if table.proxy_of]


@cache
def compose(task: str, *overrides: str) -> Config:
    return compose_config(task, list(overrides))


def composed(table: Table, row: Row, variant: str | None) -> Config:
    """Compose a cell without its folder."""
    return compose(table.task, *table.cell(row, table.seeds[0], Path("runs"), variant).settings)


def cells(table: Table) -> list[tuple[Row, str | None]]:
    """Return all rows with the first variant, and the first row with all; of several numbers of workers the first,
    because the others differ in it alone."""
    rows = [row for row in table.rows if row.workers in (None, table.rows[0].workers)]
    first, *others = list(table.variants) or [None]
    return [*((row, first) for row in rows), *((rows[0], variant) for variant in others)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.slow) for name in names_in(TABLES)]
)
def test_every_row_is_todays_recipe(name: str) -> None:
    table = read_table(name)
    for row, variant in cells(table):
        assert_composes(table, row, variant)
        assert_kept_runs_are_of_today(table, row, variant)


def assert_composes(table: Table, row: Row, variant: str | None) -> None:
    ours = ("quickstart", "figure6_runs", "imagenet", "transformer_4_gpus", "gpt2_xl")
    real = (table.published and not table.proxy_of) or table.name in ours
    config = composed(table, row, variant)
    assert config.workers.kind == ("processes" if real else "simulated"), row.name
    assert config.topology.name == row.topology.split()[0], row.name
    assert (config.parallel.method == "allreduce") == row.method.startswith(("AllReduce", "Parallel")), row.name
    if "AccumAdam" in row.method:
        assert config.optimizer.name.startswith("accumadam"), row.name
    if "DmSGD" in row.method:
        assert config.optimizer.name == ("qg_dmsgd" if row.method.startswith("QG") else "dmsgd"), row.name


def assert_kept_runs_are_of_today(table: Table, row: Row, variant: str | None) -> None:
    """Runs count by their overrides alone: if a recipe changed, old ones would be averaged with new ones."""
    today = flat(composed(table, row, variant).model_dump(mode="json"))
    configs = kept(table, row, variant)
    assert configs or table.name not in KEPT, row.name
    for name, config in configs.items():
        there = flat(config)
        shared = [key for key in there if key in today and key != "seed" and not is_bookkeeping(key)]
        assert {key: there[key] for key in shared} == {key: today[key] for key in shared}, name


def test_kept_runs_belong_to_tables() -> None:
    assert set(names_in(TABLES)) >= KEPT


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return {"a.b.c": value}, with the number for which "auto" stands on the CPUs that made the runs."""
    values = flatten(config)
    return values | ({"parallel.bucket_mb": AUTO_MB} if values.get("parallel.bucket_mb") == "auto" else {})


def kept(table: Table, row: Row, variant: str | None) -> dict[str, dict[str, Any]]:
    """Return the configurations of the runs that are in git."""
    pack = read_pack(RUNS / table.name)
    names = [str(table.cell(row, seed, RUNS, variant).run_dir.relative_to(RUNS / table.name)) for seed in table.seeds]
    return {name: pack[name].config for name in names if name in pack}


def test_everything_published_has_a_recipe_and_tables_of_runs_a_proxy() -> None:
    papers = {name for table in tables() if not table.proxy_of for name in table.published}
    benchmarks = {load_benchmark(name).published for name in names_in(BENCHMARKS)}
    figures = {getattr(load_figure(name), "published", None) for name in names_in(FIGURES)} - {None}
    assert papers | benchmarks | figures == set(names_in(PAPER)) - WITHOUT_RECIPE.keys()
    assert papers - {name for proxy in proxies() for name in proxy.published} == WITHOUT_PROXY.keys()
    assert all(proxy.name.startswith(f"{proxy.proxy_of}_") for proxy in proxies())


def test_a_proxy_has_the_rows_of_its_table() -> None:
    for proxy in proxies():
        whole = read_table(proxy.proxy_of)
        assert proxy.variants.keys() <= whole.variants.keys(), proxy.name
        ours = {row.name: (row.method, row.topology) for row in proxy.rows}
        assert {row.name: (row.method, row.topology) for row in whole.rows}.items() <= ours.items(), proxy.name


def test_every_published_column_finds_its_numbers() -> None:
    """A column of which no row has a number, not even one unknown with a reason, is misspelt."""
    for table in tables():
        rows = {row.name for row in table.rows}
        known = {
            quantity for row, values in published_values(table.published).items() if row in rows for quantity in values
        }
        wanted = {column.published_name for column in table.numbers if not column.of_runs}
        assert wanted <= known, table.name


def test_figure6_has_every_method_for_every_number_of_workers() -> None:
    table, published = read_table("figure6_runs"), load_published("figure6").frame()
    bars = published[["method", "topology", "workers", "cluster"]].replace({"method": r" \(.*\)"}, "", regex=True)
    bars["per_host"] = bars.pop("cluster").str.extract(r"(\d) per node")
    rows = {(row.method, row.topology, row.workers, row.labels["workers_per_host"]) for row in table.rows}
    published_rows = set(bars.itertuples(index=False, name=None))
    sizes = {row[2:] for row in published_rows}
    others = {("Decent", "hypercube"), ("AccumAdam", "aer")}  # the authors' "Exp"; not in the figure
    assert rows == published_rows | {(*other, *size) for other in others for size in sizes}
    for row in table.rows:
        if row.workers > 8:
            continue  # composing takes time, and these differ from others in the number of workers alone
        config = composed(table, row, None)
        assert (config.n, config.workers.per_host) == (row.workers, int(row.labels["workers_per_host"]))
        assert (config.training.steps, config.training.epochs) == (270, None)
        assert getattr(config.parallel, "push_sum", False) == (row.method == "SGP")
        assert config.build_topology().world_size == row.workers


def test_figure6_has_every_bar_beside_its_rows() -> None:
    table, places = read_table("figure6_runs"), {"a100": "4", "a40": "4", "t4": "8"}
    rows = {row.name: row for row in table.rows}
    shown = 0
    for bar in load_published("figure6").rows:
        cluster, method = bar.name.split("_")[0], bar.labels["method"]
        for name in bar.beside[f"{cluster}_time_step_ms"]:
            row, shown = rows[name], shown + 1
            assert (row.workers, row.labels["workers_per_host"]) == (bar.labels["workers"], places[cluster])
            assert method.split(" ")[0] == row.method, name
            assert row.topology in (bar.labels["topology"], "hypercube"), name
            assert published_values(table.published)[name][f"{cluster}_time_step_ms"] == bar.values["step_ms"]
    assert shown == 36 + 9  # the hypercube is beside Decent (Exp), too


def test_the_ablation_has_every_combination() -> None:
    table = read_table("ablation_fair")
    combinations = {}
    for row in table.rows:
        config = composed(table, row, None)
        one_bucket = config.parallel.method == "allreduce" and config.parallel.bucket_mb > 260
        combinations[tuple(row.labels.values())] = (
            "yes" if config.parallel.method == "decentralized" else "no",
            "no" if getattr(config.parallel, "order", None) == "atc" or one_bucket else "yes",
            "yes" if config.optimizer.name == "accumadam" else "no",
        )
    assert len(combinations) == 8
    assert all(labels == meant for labels, meant in combinations.items())
