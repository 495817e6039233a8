"""Configurations that compose, and configurations refused with a message that names key, value and expectation."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from common.config.config import Config, ConfigError
from common.config.overrides import as_hydra_reads, typed
from common.launch.compose import CONFIGS, VERSION_BASE, compose_config, suggestion

MULTISTEP = ["schedule=multistep", "schedule.warmup=2"]
# A key that is null: hydra 1.3 has nothing to delete, 1.4 deletes it.
NULL_DELETED = "~training.clip: there is nothing to delete" if VERSION_BASE else "training.clip=...: missing"


def names(group: str) -> list[str]:
    return sorted(str(f.relative_to(CONFIGS / group).with_suffix("")) for f in (CONFIGS / group).rglob("*.yaml"))


@pytest.mark.parametrize(
    "override",
    [f"{group}={name}" for group in ("topology", "schedule", "workers", "parallel") for name in names(group)]
    + [f"optimizer={name}" for name in names("optimizer")],
)
def test_every_choice_of_a_group_composes(override: str, tmp_path: Path) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n")
    extra = {
        "topology=file": [f"topology.path={edges}"],
        "optimizer=dmsgd": ["parallel.order=atc"],
        "optimizer=qg_dmsgd": ["parallel.order=atc"],
        "schedule=inverse_square_root": ["schedule.warmup=10"],
    }
    task = "gpt2" if override == "optimizer=muon" else "cnn"
    config = compose_config(task, ["workers.count=4", override, *extra.get(override, [])])
    assert config.workers.count == 4


def test_the_experiment_beats_the_task_and_the_command_line_beats_both() -> None:
    config = compose_config("cnn", ["experiment=quickstart", "training.steps=7", "schedule.warmup=2"])
    assert (config.training.steps, config.schedule.warmup, config.optimizer.lr) == (7, 2, 0.003)


def test_allreduce_brings_the_complete_topology() -> None:
    config = compose_config("cnn", ["parallel=allreduce", "workers.count=2"])
    assert (config.parallel.method, config.topology.name) == ("allreduce", "complete")


def test_sgp_is_gossip_with_push_sum() -> None:
    sgp = compose_config("cnn", ["parallel=sgp"]).parallel
    assert sgp == compose_config("cnn", ["parallel=decentralized", "parallel.push_sum=true"]).parallel


@pytest.mark.parametrize(("overrides", "order"), [([], "awc"), (["parallel.merge_after=0"], "atc")])
def test_the_order_follows_from_when_rounds_are_merged(overrides: list[str], order: str) -> None:
    assert compose_config("cnn", ["parallel=gossip_diloco", *overrides]).parallel.order == order


def test_batch_and_ranks() -> None:
    overrides = ["workers=simulated", "workers.count=2", "parallel.ranks_per_worker=4"]
    config = compose_config("cnn", overrides)
    assert (config.n, config.ranks_per_worker, config.ranks) == (2, 4, 8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.lr=-1"], ["optimizer.lr=-1", "greater than 0"]),
        (["optimizer.lr=abc"], ["optimizer.lr='abc'", "valid number"]),
        (["optimizer.lr=nan"], ["optimizer.lr", "finite"]),
        (["optimizer.lrr=1"], ["optimizer.lrr", "no such key", "did you mean 'optimizer.lr'?"]),
        (["+optimizer.lrr=1"], ["optimizer.lrr=1", "no such key", "did you mean 'optimizer.lr'?"]),
        (["optimizer.name=adamm"], ["optimizer.name=adamm", "'adamw'"]),
        (["optimizer.accumulation_steps=0"], ["optimizer.accumulation_steps=0", "greater than 0"]),
        (["optimizer=adam", "+optimizer.accumulation_steps=4"], ["optimizer.accumulation_steps=4", "no such key"]),
        (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas.1=1.0", "less than 1"]),
        ([f"training.steps={10**30}"], [f"training.steps={10**30}", "expected at most 10000000000000"]),
        (["training.steps=1.5"], ["training.steps=1.5", "integer"]),
        (["training.precision=fp64"], ["training.precision='fp64'", "'bf16'"]),
        (["training.batch_size=130", "workers.count=4"], ["training.batch_size=130", "multiple of 4"]),
        (["training.gradient_accumulation=3"], ["training.batch_size=128", "multiple of 3"]),
        (["topology=hypercube", "workers.count=6"], ["topology=hypercube", "power of two", "6"]),
        (["topology=aer", "workers.count=6", "workers.per_host=2"], ["topology=aer", "6"]),
        (["topology=base_k", "topology.k=0", "workers.count=4"], ["topology=base_k", "k"]),
        (["topology.cols=2"], ["topology=one_peer_exponential", "cols"]),
        (["workers.count=4", "workers.per_host=3"], ["workers.per_host=3", "divisor", "4"]),
        (["workers.count=0"], ["workers.count=0", "greater than 0"]),
        (["workers.count=20000"], ["world_size: expected an integer <= 16384, got 20000"]),
        (["data.shift=9"], ["data.shift=9", "less than or equal to 8"]),
        (["workers.count=abc"], ["workers.count='abc'", "valid integer"]),
        (
            ["parallel=allreduce", "parallel.hook=fp16", "workers=simulated", "workers.count=2"],
            ["parallel.hook=fp16 with workers=simulated", "expected workers=processes"],
        ),
        (["parallel=allreduce", "topology=ring"], ["topology=ring", "parallel=allreduce", "topology=complete"]),
        (["parallel.method=magic"], ["parallel.method=magic", "'allreduce'"]),
        (["optimizer=dmsgd"], ["parallel.order=awc", "parallel.order=atc"]),
        (["optimizer=qg_dmsgd"], ["optimizer=qg_dmsgd: expected parallel.order=atc"]),
        (["optimizer=muon"], ["optimizer=muon: expected another one", "transformers"]),
        (
            ["optimizer=qg_dmsgd", "parallel.order=atc", "parallel.outer.lr=0.5"],
            ["outer.lr=0.5 with optimizer=qg_dmsgd"],
        ),
        (
            ["optimizer=dmsgd", "parallel.order=atc", "parallel.local_steps=2"],
            ["parallel.local_steps=2", "optimizer.momentum_mixing=true", "expected a round in every update"],
        ),
        (["parallel.local_steps=0"], ["parallel.local_steps=0", "greater than 0"]),
        (["parallel.local_steps=4", "parallel.merge_after=5"], ["parallel.merge_after=5: expected 0 to local_steps=4"]),
        (["parallel.outer.lr=2"], ["parallel.outer.lr=2.0: expected a number in (0, 2)"]),
        (["parallel.outer.lrr=1"], ["parallel.outer.lrr: no such key; did you mean 'parallel.outer.lr'?"]),
        (
            ["parallel.local_steps=4", "topology.idle_rounds=1", "workers.count=4"],
            ["parallel.local_steps=4", "idle_rounds=1", "expected idle_rounds=0"],
        ),
        (["parallel=allreduce", "+parallel.local_steps=3"], ["parallel.local_steps=3", "no such key"]),
        (["schedule.warmup=300"], ["schedule.warmup=300", "training.steps=300"]),
        ([*MULTISTEP, "schedule.milestones=5"], ["schedule.milestones=5", "list"]),
        ([*MULTISTEP, "schedule.milestones=[5,5]"], ["schedule.milestones=[5.0, 5.0]", "ever later milestones"]),
        ([*MULTISTEP, "schedule.milestones=[5,3]"], ["schedule.milestones=[5.0, 3.0]", "ever later milestones"]),
        ([*MULTISTEP, "schedule.milestones=[1,4]"], ["[1.0, 4.0], warmup=2", "none of them in the warm-up"]),
        ([*MULTISTEP, "schedule.milestones=[5]", "schedule.gamma=1.1"], ["schedule.gamma=1.1", "equal to 1"]),
        (["seed=-1"], ["seed=-1", "greater than or equal to 0"]),
        (["seed=20261128103000"], ["seed=20261128103000", "less than or equal to 10000000000000"]),
        (["name=../../up"], ["name=../../up: expected a name without `..`"]),
        (["name="], ["name=: expected a name without", "empty parts"]),
        (["name=/a"], ["name=/a: expected a name without", "empty parts"]),
        (["run_dir=~nobody-of-that-name/x"], ["run_dir=~nobody-of-that-name/x: no such user"]),
        (["optimizer=null"], ["optimizer=null: expected one of: accumadam, accumadamw, adam"]),
        (["experiment=null"], ["experiment=null: expected one of"]),
        (["optimizer=[1]"], ["optimizer=[1]: expected one of: accumadam"]),
        (["=1"], ["=1: expected key=value"]),
        (["workers=4"], ["workers=4: expected one of: processes, simulated"]),
        (["topology=rign"], ["topology=rign: unknown; did you mean 'ring'?"]),
        (["optimizer.lr=${foo}"], ["optimizer.lr: Interpolation key 'foo' not found"]),
        (["optimizer.lr=${oc.env:NOPE}"], ["optimizer.lr", "Environment variable 'NOPE' not found"]),
        (["optimizer.lr=[1"], ["'optimizer.lr=[1': cannot be read as key=value"]),
        (["~training.klip"], ["~training.klip: there is nothing to delete"]),
        (["~training.clip"], [NULL_DELETED]),
        (["hydra.run.dir=elsewhere"], ["hydra.run.dir=elsewhere: has no effect", "run_dir=FOLDER"]),
        (["lr=1e-3"], ["lr: no such key; did you mean 'optimizer.lr'?"]),
        (["optimizer=adam", "optimizer.accumulation_steps=4"], ["key of optimizer=accumadam, optimizer=accumadamw"]),
        (["traning.steps=3"], ["traning.steps", "did you mean 'training.steps'?"]),
        (["optimizer.weight_decay=-0.1"], ["optimizer.weight_decay=-0.1", "greater than or equal to 0"]),
        (["optimizer=sgd", "optimizer.momentum=2"], ["optimizer.momentum=2", "less than or equal to 1"]),
        (["training.steps=null"], ["steps=None, epochs=None", "exactly one"]),
        (["training.on_nan=ignore"], ["training.on_nan='ignore'", "'warn'"]),
        (["training.device=tpu"], ["training.device='tpu'", "'cuda'"]),
        (["logging.progress=3"], ["logging.progress=3", "boolean"]),
        (["parallel.timeout_s=0"], ["parallel.timeout_s=0", "greater than 0"]),
        (["parallel.timeout_s=1e300"], ["parallel.timeout_s=1e+300", "less than or equal to 1000000000"]),
        (["parallel.bucket_mb=-2"], ["parallel.bucket_mb=-2", "greater than 0, or auto"]),
        (
            ["parallel.message_dtype=int8", "workers=simulated", "workers.count=2"],
            ["parallel.message_dtype=int8 with workers=simulated", "expected workers=processes"],
        ),
        (["topology=file", "topology.path=nowhere.txt", "workers.count=4"], ["topology=file", "nowhere.txt"]),
        (["label_smoothing=1"], ["label_smoothing=1", "less than 1"]),
        (["data.validation_fraction=1.5"], ["data.validation_fraction=1.5", "less than 1"]),
    ],
)
def test_bad_input_is_refused_by_name(overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config("cnn", overrides)
    for part in expected:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_key_is_not_suggested_for_itself() -> None:
    assert suggestion("foo", ["foo.bar", "seed"]) == ""  # ++foo.bar=1


@pytest.mark.parametrize(
    "words",
    [
        ["elastic=true", "elastic.agent=10.0.0.1:29500"],
        ["elastic.agent=10.0.0.1:29500", "elastic=true"],
        ["elastic=false", "elastic.agent=10.0.0.1:29500", "elastic=true"],
    ],
)
def test_elastic_true_stands_beside_its_keys_in_any_order(words: list[str]) -> None:
    elastic = compose_config("cnn", ["workers.count=8", "workers.per_host=4", *words]).elastic
    assert (elastic.min_workers, elastic.restarts, elastic.agent) == (2, 10, "10.0.0.1:29500")


def test_keys_of_elastic_beat_its_shorthand() -> None:
    for words in (["elastic.min_workers=4", "elastic=true"], ["elastic=true", "elastic.min_workers=4"]):
        elastic = compose_config("cnn", ["workers.count=8", *words]).elastic
        assert (elastic.min_workers, elastic.restarts) == (4, 10)
    assert compose_config("cnn", ["workers.count=8", "elastic.min_workers=4", "elastic=false"]).elastic.min_workers == 4
    assert compose_config("cnn", ["elastic=false"]).elastic.min_workers is None


@pytest.mark.parametrize(
    "text", ["1", "1e-3", "007", "true", "nan", "a=b", "a b", "[x", "lr=0.1,seed=2", "ü(1)", "a#b", "2024-01-01"]
)
def test_texts_are_taken_as_typed(text: str) -> None:
    words = [f"name={text}", f"run_dir={text}/run", f"init_from={text}/best.pt"]
    config = compose_config("cnn", words)
    assert (config.name, config.run_dir, config.init_from) == (text, f"{text}/run", f"{text}/best.pt")


def test_quotes_and_interpolations_keep_their_meaning() -> None:
    config = compose_config("cnn", ["name='a=b'", 'run_dir="runs/${name}"', "init_from=null"])
    assert (config.name, config.run_dir, config.init_from) == ("a=b", "runs/a=b", None)


@pytest.mark.parametrize("value", ["runs/a", "runs/lr=0.1", "a,b", "it's", "a b", "back\\", "007", "${x}\\'y"])
def test_a_printed_override_can_be_typed_again(value: str) -> None:
    (word,) = shlex.split(typed("name", value))
    (read,) = as_hydra_reads(Config, [word])
    assert OverridesParser.create().parse_override(read).value() == value


def test_the_home_folder_is_found_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = compose_config("cnn", ["run_dir=~/a", "init_from='~/b.pt'", "data=imagenet", "data.folder=~/c"])
    paths = config.run_dir, config.init_from, config.data.folder
    assert paths == ("/somewhere/a", "/somewhere/b.pt", "/somewhere/c")
    with pytest.raises(ConfigError, match="/somewhere/edges"):
        compose_config("cnn", ["topology=file", "topology.path=~/edges", "workers.count=4"])


def test_the_launchers_world_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = compose_config("cnn", [])
    assert (config.workers.count, config.workers.per_host) == (8, 4)
    assert compose_config("cnn", ["parallel.ranks_per_worker=4"]).workers.count == 2
    assert compose_config("cnn", ["workers=simulated", "workers.count=16"]).workers.count == 16
    with pytest.raises(ConfigError, match=r"workers\.count=4: the launcher started 8 processes"):
        compose_config("cnn", ["workers.count=4"])
    with pytest.raises(ConfigError, match=r"parallel\.ranks_per_worker=3: the launcher started 8 processes"):
        compose_config("cnn", ["parallel.ranks_per_worker=3"])
    with pytest.raises(ConfigError, match=r"parallel\.ranks_per_worker=0: .* greater than 0"):
        compose_config("cnn", ["parallel.ranks_per_worker=0"])
    assert compose_config("cnn", ["workers.per_host=2"]).workers.per_host == 2  # hosts in name only
