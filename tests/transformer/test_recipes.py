"""Recipes and tables: everything composes without data, and the values are those that the paper publishes."""

from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import CONFIGS, compose_config
from transformer.config import TransformerConfig

TABLES = {name: load_table(name) for name in ("table2", "table2_fair")}
CELLS = [(row, pair) for row in TABLES["table2"].rows for pair in TABLES["table2"].variants]
EXPERIMENTS = [
    str(path.relative_to(CONFIGS / "experiment").with_suffix(""))
    for folder in ("table2", "figure6", "transformer")
    for path in sorted((CONFIGS / "experiment" / folder).glob("*.yaml"))
]
METHODS = {
    "AllReduce": ("allreduce", "adam", (0.9, 0.98), None),
    "DAdam": ("decentralized", "adam", (0.974, 0.999), None),
    "AccumAdam": ("decentralized", "accumadam", (0.9, 0.999), 8),
}
LR_OF_16 = {"AllReduce": 7e-4, "DAdam": 2.8e-3, "AccumAdam": 7e-4}
PUBLISHED_FOR_8 = {  # betas and learning rate
    "AllReduce": ((0.9, 0.98), 7e-4),
    "DAdam": ((0.974, 0.999), 2e-3),
    "AccumAdam": ((0.9, 0.999), 8e-4),
}


@cache
def compose(*overrides: str) -> TransformerConfig:
    return compose_config("transformer", list(overrides))


def composed(table: Table, row: Row, pair: str) -> TransformerConfig:
    return compose(*table.cell(row, table.seeds[0], Path("runs"), pair).overrides)


def steps_of(config: TransformerConfig) -> int | None:
    return getattr(config.optimizer, "accumulation_steps", None)


@pytest.mark.parametrize(("row", "pair"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_every_cell_composes_to_what_its_labels_say(row: Row, pair: str) -> None:
    table = TABLES["table2"]
    config = composed(table, row, pair)
    method, optimizer, betas, s = METHODS[row.method]
    assert (config.parallel.method, config.topology.name) == (method, row.topology)
    assert (config.optimizer.name, config.optimizer.betas, steps_of(config)) == (optimizer, betas, s)
    assert (config.optimizer.eps, config.lr, config.optimizer.weight_decay) == (1e-9, LR_OF_16[row.method], 0)
    assert (config.n, config.workers.per_host, config.seed) == (16, 4, table.seeds[0])
    assert f"{config.data.source}_{config.data.target}" == pair
    assert config.build_topology().world_size == 16


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_table2_and_of_its_proxy(name: str) -> None:
    table = TABLES[name]
    decentralized = [(method, topology) for method in ("DAdam", "AccumAdam") for topology in ("aer", "complete")]
    rows = [row for row in table.rows if "," not in row.method]
    assert [(row.method, row.topology) for row in rows] == [("AllReduce", "complete"), *decentralized]
    assert (len(table.seeds), list(table.variants)) == {
        "table2": (3, ["en_de", "en_fr"]),
        "table2_fair": (5, ["en_fr"]),
    }[name]


@pytest.mark.parametrize(("method", "s"), [("AllReduce", None), ("DAdam", None), ("AccumAdam", 4)])
def test_the_published_rows_of_the_proxy_have_the_values_for_8_workers(method: str, s: int | None) -> None:
    (row,) = (row for row in TABLES["table2_fair"].rows if row.method == f"{method}, published rate")
    optimizer, (betas, lr) = composed(TABLES["table2_fair"], row, "en_fr").optimizer, PUBLISHED_FOR_8[method]
    assert (optimizer.betas, optimizer.lr, getattr(optimizer, "accumulation_steps", None)) == (betas, lr, s)


@pytest.mark.parametrize("name", TABLES)
def test_rows_differ_in_method_topology_and_optimizer_only(name: str) -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer"}
    for pair in TABLES[name].variants:
        shared = [composed(TABLES[name], row, pair).model_dump(exclude=free) for row in TABLES[name].rows]
        assert all(values == shared[0] for values in shared)


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if not e.startswith("transformer")])
def test_every_recipe_has_what_the_paper_says_of_all(experiment: str) -> None:
    config = compose(f"experiment={experiment}")
    timing = experiment.startswith("figure6")
    assert (config.workers.kind, config.data.name) == ("processes", "wmt14_en_de")
    assert (config.training.epochs, config.training.steps) == ((24, None) if timing else (None, 130_000))
    assert config.training.batch_size == (64 * (25_000 // 64) if timing else 16 * (25_000 // 16))
    assert (config.model.name, config.model.dropout, config.label_smoothing) == ("transformer_base", 0.1, 0.1)
    schedule = config.schedule
    assert (schedule.name, schedule.unit, schedule.warmup) == ("inverse_square_root", "steps", 4000)
    decoding = config.decoding
    assert (decoding.beam, decoding.length_penalty, decoding.extra_length) == (4, 0.6, 50)
    assert (config.seed, config.evaluation.every, config.evaluation.keep_average) == (810975, None, True)


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if not e.startswith("transformer/proxy")])
def test_every_recipe_has_what_the_authors_code_does_for_all(experiment: str) -> None:
    expect_authors_code(compose(f"experiment={experiment}"), experiment)


def test_the_other_pair_has_it_too() -> None:
    table = TABLES["table2"]
    expect_authors_code(composed(table, table.rows[0], "en_fr"), "table2")


def expect_authors_code(config: TransformerConfig, experiment: str) -> None:
    assert (config.model.variant, config.model.attention_dropout) == ("paper", None)
    assert (config.data.validation, config.data.cleaning, config.data.max_length) == ("held_out", "empty_lines", 157)
    assert (config.smoothed_over, config.loss_divisor, config.token_limit) == ("all_tokens", "own_tokens", "both_sides")
    assert (config.schedule.warmup_start, config.schedule.first) == (0.01, 1)
    assert config.optimizer.eps == 1e-9 or experiment.endswith("/base")
    assert (config.training.tf32, config.training.compile, config.training.clip) == (True, False, None)
    assert config.training.precision == ("fp16" if experiment.startswith("transformer") else "fp32")
    assert not config.decoding.in_training


def test_the_pairs_of_table2() -> None:
    assert TABLES["table2"].seeds == (810975, 810976, 810977)
    base, big = (composed(TABLES["table2"], TABLES["table2"].rows[0], pair) for pair in ("en_de", "en_fr"))
    assert (base.model.name, base.data.name, base.training.steps) == ("transformer_base", "wmt14_en_de", 130_000)
    assert (big.model.name, big.data.name, big.training.steps) == ("transformer_big", "wmt14_en_fr", 302_500)
    assert base.schedule == big.schedule
    assert big.model.dropout == 0.1
    assert (base.model.width, base.model.hidden, base.model.heads) == (512, 2048, 8)
    assert (big.model.width, big.model.hidden, big.model.heads) == (1024, 4096, 16)
    assert {base.model.encoder_layers, base.model.decoder_layers, big.model.encoder_layers} == {6}


@pytest.mark.parametrize(
    ("experiment", "workers", "per_host", "lr", "s"),
    [
        ("dadam_8", 8, 4, 2.0e-3, None),
        ("dadam_16", 16, 4, 2.8e-3, None),
        ("dadam_32", 32, 4, 3.8e-3, None),
        ("dadam_64", 64, 8, 3.8e-3, None),  # lr: a stand-in
        ("accumadam_8", 8, 4, 8e-4, 4),
        ("accumadam_16", 16, 4, 7e-4, 8),
        ("accumadam_32", 32, 4, 7e-4, 8),  # lr and s: stand-ins
        ("accumadam_64", 64, 8, 7e-4, 8),  # lr and s: stand-ins
    ],
)
@pytest.mark.parametrize("topology", [None, "hypercube", "one_peer_exponential", "complete"])
def test_the_worker_counts_of_figure6(
    experiment: str, workers: int, per_host: int, lr: float, s: int | None, topology: str | None
) -> None:
    config = compose(f"experiment=figure6/{experiment}", *([f"topology={topology}"] if topology else []))
    method = {"dadam": "DAdam", "accumadam": "AccumAdam"}[experiment.split("_")[0]]
    assert (config.n, config.workers.per_host, config.lr) == (workers, per_host, lr)
    assert (config.parallel.method, config.topology.name) == ("decentralized", topology or "aer")
    assert (config.optimizer.name, config.optimizer.betas, steps_of(config)) == (*METHODS[method][1:3], s)
    assert config.optimizer.eps == 1e-9
    assert config.name == f"figure6_{experiment.split('_')[0]}_{topology or 'aer'}_{workers}"
    assert config.build_topology().world_size == workers


@pytest.mark.parametrize("workers", [8, 16, 32, 64])
def test_allreduce_is_the_same_for_all_worker_counts(workers: int) -> None:
    config = compose("experiment=figure6/allreduce", f"workers.count={workers}")
    assert (config.n, config.lr, config.optimizer.betas, config.optimizer.eps) == (workers, 7e-4, (0.9, 0.98), 1e-9)
    assert (config.parallel.method, config.optimizer.name) == ("allreduce", "adam")
    assert config.name == f"figure6_allreduce_{workers}"


def test_the_proxy_of_table2_has_the_recipes_structure() -> None:
    for row in TABLES["table2"].rows:
        (proxy_row,) = (other for other in TABLES["table2_fair"].rows if other.name == row.name)
        recipe, proxy = composed(TABLES["table2"], row, "en_fr"), composed(TABLES["table2_fair"], proxy_row, "en_fr")
        assert (proxy.data.name, proxy.workers.kind, proxy.n) == ("number_names", "simulated", 8)
        same = ("label_smoothing", "decoding.beam", "decoding.length_penalty", "decoding.extra_length")
        same += ("schedule.name", "optimizer.name", "optimizer.eps", "parallel.method", "topology.name")
        assert [attrgetter(key)(proxy) for key in same] == [attrgetter(key)(recipe) for key in same]
        assert proxy.schedule.warmup == 0.04 * proxy.training.steps
        assert (proxy.model.variant, proxy.model.dropout) == ("fairseq", 0.1)
        assert (proxy.evaluation.keep_average, proxy.decoding.in_training) == (True, True)


def test_the_proxys_note_says_what_its_data_and_runs_are() -> None:
    table = TABLES["table2_fair"]
    proxy, note = composed(table, table.rows[0], "en_fr"), " ".join(table.note.split())
    assert f"{proxy.data.held_out_lines} validation lines" in note
    assert f"numbers below {proxy.data.numbers:,}" in note
    assert f"a run of {proxy.training.steps:,} steps" in note
    assert f"every {proxy.evaluation.every} steps" in note


def test_the_proxy_of_one_command() -> None:
    config = compose("experiment=transformer/proxy")
    assert (config.parallel.method, config.optimizer.name, config.optimizer.betas) == ("allreduce", "adam", (0.9, 0.98))
    assert (config.workers.kind, config.n, config.data.numbers) == ("processes", 2, 1_000_000)
    assert config.decoding.in_training


@pytest.mark.parametrize(("method", "betas", "s"), [("allreduce", (0.9, 0.98), None), ("accumadam", (0.9, 0.999), 4)])
def test_the_public_recipes_for_four_gpus(method: str, betas: tuple[float, float], s: int | None) -> None:
    config = compose(f"experiment=transformer/{method}_4_gpus")
    assert (config.n, config.workers.per_host, config.topology.name, config.seed) == (4, 4, "complete", 810977)
    assert (config.lr, config.optimizer.betas, steps_of(config)) == (7e-4, betas, s)
    assert (config.training.epochs, config.training.steps, config.training.batch_size) == (20, None, 25_000)
    assert (config.schedule.unit, config.schedule.warmup) == ("steps", 4000)
    decay = {"allreduce": (0.0, "norms_and_biases"), "accumadam": (1 / 32768, "nothing")}  # decent-dp 0.1.2's default
    assert (config.optimizer.weight_decay, config.optimizer.no_decay) == decay[method]
