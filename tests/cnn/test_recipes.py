"""Recipes and tables: everything composes without data, and the values are those that the papers publish."""

from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from cnn.config import CnnConfig
from common.experiments.table_file import Row
from common.experiments.tables import Table, load_table
from common.launch.compose import CONFIGS, compose_config

TABLES = {
    name: load_table(name)
    for name in (
        "quickstart",
        "table3",
        "table3_fair",
        "exponential",
        "exponential_fair",
        "exponential_methods",
        "exponential_cifar10",
        "heterogeneous",
    )
}
ROWS = [(table, row) for table in TABLES.values() for row in table.rows]
TOPOLOGIES = ["ring", "grid", "random_matching", "static_exponential", "one_peer_exponential"]


def composed(table: Table, row: Row) -> CnnConfig:
    return compose(*table.cell(row, table.seeds[0], Path("runs")).overrides)


@cache
def compose(*overrides: str) -> CnnConfig:
    return compose_config("cnn", list(overrides))


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda value: value.name)
def test_every_row_composes_to_what_its_labels_say(table: Table, row: Row) -> None:
    config, name = composed(table, row), row.method.partition(",")[0]
    method = {
        "AllReduce": "adam",
        "Parallel SGD": "sgd",
        "DAdam": "adam",
        "AccumAdam": "accumadam",
        "DSGD": "sgd",
        "vanilla DmSGD": "dmsgd",
        "DmSGD": "dmsgd",
        "QG-DmSGD": "qg_dmsgd",
    }
    assert config.optimizer.name == method[name]
    if "DmSGD" in name:
        assert getattr(config.optimizer, "momentum_mixing", False) == (name == "DmSGD")
    if "SGD" in name:
        assert config.optimizer.momentum == (0 if name == "DSGD" else 0.9)
        assert getattr(config.parallel, "order", "atc") == "atc"
    assert config.parallel.method == ("allreduce" if name in ("AllReduce", "Parallel SGD") else "decentralized")
    assert config.topology.name == row.topology
    assert config.n == (row.workers or config.n)
    assert config.seed == table.seeds[0]
    assert config.build_topology().world_size == config.n


@pytest.mark.parametrize("experiment", [path.stem for path in (CONFIGS / "experiment/table3").glob("*.yaml")])
def test_every_experiment_of_table3_has_what_the_paper_says_of_all(experiment: str) -> None:
    config = compose_config("cnn", [f"experiment=table3/{experiment}"])
    assert config.name == f"table3_{experiment}"
    assert (config.workers.kind, config.n, config.workers.per_host, config.ranks) == ("processes", 32, 8, 32)
    assert (config.training.batch_size, config.training.epochs, config.training.steps) == (1024, 90, None)
    assert (config.model.name, config.model.channels_last, config.data.name) == ("resnet50", True, "imagenet")
    assert (config.data.train_crop, config.data.resize, config.data.validation_crop) == (176, 256, 224)
    assert (config.schedule.name, config.schedule.unit, config.schedule.warmup) == ("cosine", "epochs", 5)
    assert config.schedule.warmup_start == 0.01
    assert config.schedule.final_fraction * config.lr == pytest.approx(1e-5) or experiment == "base"
    assert (config.optimizer.weight_decay, config.optimizer.no_decay) == (1 / 32768, "named_bn_or_bias")
    assert (config.label_smoothing, config.seed, config.training.precision) == (0.1, 810975, "fp16")
    assert config.evaluation.local_models
    assert not config.evaluation.keep_average


@pytest.mark.parametrize(
    ("experiment", "method", "topology", "optimizer", "lr", "s"),
    [
        ("allreduce", "allreduce", "complete", "adam", 1e-3, None),
        ("dadam_aer", "decentralized", "aer", "adam", 1e-3, None),  # lr: a stand-in
        ("dadam_complete", "decentralized", "complete", "adam", 1e-3, None),  # lr: a stand-in
        ("accumadam_aer", "decentralized", "aer", "accumadam", 1.5e-3, 8),
        ("accumadam_complete", "decentralized", "complete", "accumadam", 1.5e-3, 8),  # lr and s: stand-ins
    ],
)
def test_table3(experiment: str, method: str, topology: str, optimizer: str, lr: float, s: int | None) -> None:
    config = compose_config("cnn", [f"experiment=table3/{experiment}"])
    assert (config.parallel.method, config.topology.name) == (method, topology)
    assert (config.optimizer.name, config.lr, getattr(config.optimizer, "accumulation_steps", None)) == (
        optimizer,
        lr,
        s,
    )
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.999), 1e-8)


def test_rows_of_table3_differ_in_method_topology_and_optimizer_only() -> None:
    free = {"name", "run_dir", "parallel", "topology", "optimizer", "schedule"}  # schedule: final lr as a fraction
    shared = [composed(TABLES["table3"], row).model_dump(exclude=free) for row in TABLES["table3"].rows]
    assert all(values == shared[0] for values in shared)


@pytest.mark.parametrize("servers", [4, 8, 16, 32])
@pytest.mark.parametrize("topology", ["parallel_sgd", *TOPOLOGIES])
def test_exponential(topology: str, servers: int) -> None:
    experiment = "imagenet_parallel_sgd" if topology == "parallel_sgd" else "imagenet"
    choice = [] if topology == "parallel_sgd" else [f"topology={topology}"]
    config = compose_config("cnn", [f"experiment=exponential/{experiment}", f"workers.count={servers}", *choice])
    assert config.name == f"exponential_{topology}_{servers}"
    assert (config.n, config.ranks_per_worker, config.ranks, config.workers.per_host) == (servers, 8, 8 * servers, 1)
    assert (config.training.epochs, config.training.precision, config.model.name) == (90, "fp16", "resnet50")
    schedule = config.schedule
    assert (schedule.name, schedule.unit, schedule.warmup) == ("multistep", "epochs", 5)
    assert (schedule.milestones, schedule.gamma) == ([30, 60, 80], 0.1)
    assert schedule.warmup_start == 1 / (8 * servers)  # the rate of one GPU
    optimizer = config.optimizer
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 5e-5)
    assert optimizer.no_decay == "nothing"
    assert config.training.batch_size == 32 * 8 * servers
    assert config.lr == pytest.approx(0.1 * servers)  # 0.1 for 256 images
    if topology == "parallel_sgd":
        assert (config.parallel.method, config.topology.name, config.optimizer.name) == ("allreduce", "complete", "sgd")
        assert not config.optimizer.nesterov
    else:
        assert (config.parallel.method, config.parallel.order) == ("decentralized", "atc")
        assert (config.topology.name, config.optimizer.name, config.optimizer.momentum_mixing) == (
            topology,
            "dmsgd",
            True,
        )


def test_methods_and_networks_differ_in_nothing_else() -> None:
    table = TABLES["exponential_methods"]
    assert {row.workers for row in table.rows} == {8}
    assert len({(row.method, row.topology) for row in table.rows}) == 1 + 3 * 2
    row, *others = table.rows
    cells = [table.cell(row, 1, Path("runs"), network) for network in table.variants]
    configs = [compose(*cell.overrides) for cell in cells] + [composed(table, other) for other in others]
    networks = {config.model.architecture for config in configs}
    assert networks == {"resnet50", "mobilenet_v2", "efficientnet_b0"}
    free = {"name", "run_dir", "parallel", "topology", "optimizer", "model"}
    assert all(config.model_dump(exclude=free) == configs[0].model_dump(exclude=free) for config in configs)
    shared = ("lr", "lr_batch", "momentum", "weight_decay", "no_decay")
    assert len({tuple(getattr(config.optimizer, key) for key in shared) for config in configs}) == 1


@pytest.mark.parametrize("topology", ["static_exponential", "one_peer_exponential"])
def test_cifar10(topology: str) -> None:
    (row,) = (row for row in TABLES["exponential_cifar10"].rows if row.topology == topology)
    config = composed(TABLES["exponential_cifar10"], row)
    assert config.name == f"exponential_cifar10_{topology}_4"
    assert (config.n, config.ranks, config.workers.per_host, config.seed) == (4, 4, 1, 42)
    assert (config.model.name, config.model.depth, config.data.name) == ("resnet_cifar", 56, "cifar10")
    assert (config.data.shift, config.data.flip) == (4, True)
    assert (config.training.epochs, config.training.steps, config.training.batch_size) == (200, None, 4 * 128)
    assert config.lr == pytest.approx(0.01 * 4)
    schedule = config.schedule
    assert (schedule.name, schedule.warmup, schedule.final_fraction, schedule.change) == ("cosine", 0, 0, "epoch")
    optimizer = config.optimizer
    assert (optimizer.momentum, optimizer.weight_decay, optimizer.no_decay) == (0.9, 5e-4, "norms_and_biases")
    assert (optimizer.momentum_mixing, config.parallel.order) == (False, "atc")  # as the authors' script
    assert config.label_smoothing == 0
    assert config.evaluation.local_models


# -- tables


def test_columns_of_the_proxies() -> None:
    assert ",".join(column.name for column in TABLES["table3_fair"].columns).startswith(
        "method,topology,workers,seeds,local_over_noise_mean,global_over_noise_mean,learning_rate_mean,top1_mean"
    )
    assert ",".join(column.name for column in TABLES["exponential_fair"].columns).startswith(
        "method,topology,workers,seeds,local_over_noise_mean,global_over_noise_mean,learning_rate_mean,top1_mean"
    )


@pytest.mark.parametrize(("name", "seeds", "workers"), [("table3", 3, (32, 8)), ("table3_fair", 5, (8, 4))])
def test_rows_of_table3_and_of_its_proxy(name: str, seeds: int, workers: tuple[int, int]) -> None:
    rows = [(row.method, row.topology) for row in TABLES[name].rows][:5]
    decentralized = [(method, topology) for method in ("DAdam", "AccumAdam") for topology in ("aer", "complete")]
    assert rows == [("AllReduce", "complete"), *decentralized]
    assert len(TABLES[name].seeds) == seeds
    configs = [composed(TABLES[name], row) for row in TABLES[name].rows]
    assert {(config.n, config.workers.per_host) for config in configs} == {workers}


@pytest.mark.parametrize(("name", "seeds"), [("exponential", 3), ("exponential_fair", 5)])
def test_rows_of_the_exponential_graphs_table_and_of_its_proxy(name: str, seeds: int) -> None:
    rows = [(row.method, row.topology, row.workers) for row in TABLES[name].rows]
    labels = [("Parallel SGD", "complete"), *(("DmSGD", topology) for topology in TOPOLOGIES)]
    labels += [("DmSGD", "torus")] * (name == "exponential_fair")
    assert rows == [(*label, workers) for label in labels for workers in (4, 8, 16, 32)]
    assert len(TABLES[name].seeds) == seeds


@pytest.mark.parametrize("workers", [4, 8, 16, 32])
def test_the_grid_is_as_square_as_can_be(workers: int) -> None:
    config = compose_config("cnn", ["experiment=exponential/imagenet", "topology=grid", f"workers.count={workers}"])
    rows, cols = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8)}[workers]
    W = config.build_topology().matrix(0)
    assert np.count_nonzero(np.triu(W, 1)) == rows * (cols - 1) + cols * (rows - 1)


# -- proxies: the structure of the recipes


@pytest.mark.parametrize("name", ["table3_fair", "exponential_fair"])
def test_a_proxys_note_says_what_makes_it_harder(name: str) -> None:
    data, note = composed(TABLES[name], TABLES[name].rows[0]).data, TABLES[name].note
    assert f"{ceil(1797 * data.validation_fraction)} held-out images" in note
    assert (f"{100 * data.label_noise:g} % of the training labels are wrong" in note) == (data.label_noise > 0)
    assert ("different images of few classes" in " ".join(note.split())) == (data.partition == "dirichlet")


def test_the_proxy_of_table3_has_the_recipes_structure() -> None:
    for row, proxy_row in zip(TABLES["table3"].rows, TABLES["table3_fair"].rows[:5], strict=True):
        recipe, proxy = composed(TABLES["table3"], row), composed(TABLES["table3_fair"], proxy_row)
        assert (proxy.data.name, proxy.model.name, proxy.workers.kind) == ("digits", "resnet_digits", "simulated")
        assert proxy.parallel == recipe.parallel
        assert proxy.topology == recipe.topology
        assert (proxy.schedule.name, proxy.schedule.unit) == (recipe.schedule.name, recipe.schedule.unit)
        assert proxy.schedule.warmup / proxy.training.epochs == pytest.approx(5 / 90)
        assert proxy.schedule.warmup_start == recipe.schedule.warmup_start
        assert (proxy.label_smoothing, proxy.optimizer.weight_decay) == (0.1, 1 / 32768)
        assert proxy.evaluation.local_models
        if row.method == "AccumAdam":
            assert (proxy.optimizer.accumulation_steps, recipe.optimizer.accumulation_steps) == (4, 8)


def test_the_proxy_of_the_exponential_graphs_has_the_recipes_structure() -> None:
    rows = [row for row in TABLES["exponential_fair"].rows if row.topology != "torus"]
    for row, proxy_row in zip(TABLES["exponential"].rows, rows, strict=True):
        recipe, proxy = composed(TABLES["exponential"], row), composed(TABLES["exponential_fair"], proxy_row)
        assert (proxy.data.name, proxy.model.name, proxy.workers.kind) == ("digits", "resnet_digits", "simulated")
        assert (proxy.parallel.method, proxy.topology, proxy.n) == (recipe.parallel.method, recipe.topology, recipe.n)
        fractions = [step / proxy.training.steps for step in (proxy.schedule.warmup, *proxy.schedule.milestones)]
        assert fractions == pytest.approx([5 / 90, 30 / 90, 60 / 90, 80 / 90])
        assert (proxy.optimizer.name, proxy.optimizer.momentum) == (recipe.optimizer.name, recipe.optimizer.momentum)
        assert proxy.lr / proxy.training.batch_size == pytest.approx(proxy.optimizer.lr / proxy.optimizer.lr_batch)
        assert proxy.training.batch_size % proxy.n == 0
        if row.method == "DmSGD":
            assert proxy.parallel.order == "atc"
