import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from common.cli import UsageError
from common.experiments.definitions import parse_override
from common.experiments.tables import load_table
from common.record.run_folder import compare
from tests.experiments.conftest import CONTENT


def test_runs_lie_in_a_folder_of_the_tables_name(tmp_path):
    folder = write(tmp_path, lambda content: None)
    (folder / "small.yaml").rename(folder / "mine.yaml")
    assert next(load_table("mine", folder=folder).cells(Path("runs"))).run_dir == Path("runs/mine/allreduce/seed_1")


def write(folder: Path, change) -> Path:
    content = copy.deepcopy(CONTENT)
    change(content)
    OmegaConf.save(content, folder / "small.yaml")
    return folder


BAD = {
    "seedz: unknown key; did you mean 'seeds'?": lambda c: c.update(seedz=[1]),
    "rows.0.nmae: unknown key; did you mean 'name'?": lambda c: c["rows"][0].update(nmae="x"),
    "title=...: missing; expected a line of text": lambda c: c.pop("title"),
    "task='cn': expected 'cnn', 'transformer' or 'gpt2'": lambda c: c.update(task="cn"),
    "seeds.1='two': expected a valid integer": lambda c: c.update(seeds=[1, "two"]),
    "seeds: expected each once, got 2 more than once": lambda c: c.update(seeds=[1, 2, 2]),
    "rows.1.name='A B'": lambda c: c["rows"][1].update(name="A B"),
    "the rows' names: expected each once": lambda c: c["rows"][1].update(name="allreduce"),
    "method, topology, workers and labels of the rows: expected each once, got AllReduce complete more": lambda c: c[
        "rows"
    ][1].update(method="AllReduce", topology="complete"),
    "overrides.0='experiment': 'experiment': expected one Hydra": lambda c: c.update(overrides=["experiment"]),
    "expected one value, got a sweep": lambda c: c.update(overrides=["optimizer.lr=1,2"]),
    "seed is set for each run": lambda c: c["rows"][0].update(overrides=["seed=7"]),
    "run_dir is set for each run": lambda c: c.update(overrides=["run_dir=x"]),
    "row 'allreduce': expected each once, got parallel": lambda c: c.update(overrides=["parallel=sgp"]),
    "workers.1=0: expected greater than 0": lambda c: c.update(workers=[4, 0]),
    "the rows' names: expected each once, got accumadam_aer_4, allreduce_4": lambda c: c.update(workers=[4, 4]),
    "columns.1='acuracy_mean': did you mean 'accuracy_mean'?": lambda c: c.update(columns=["method", "acuracy_mean"]),
    "columns.0=7: expected a column's name": lambda c: c.update(columns=[7]),
    "columns.0='top1_difference': differences and speed-ups need a baseline": lambda c: c.update(
        columns=["top1_difference"]
    ),
    "cluster='a40_4x5': did you mean 'a40_4x4'?": lambda c: c["rows"][0].update(cluster="a40_4x5"),
    "proxy_of='table33': did you mean 'table3'?": lambda c: c.update(proxy_of="table33"),
    "over='paralel': did you mean 'parallel'?": lambda c: c.update(over="paralel"),
    "tuned_by=quickstart: expected neither a sweep nor centres": lambda c: (
        c.update(tuned_by="quickstart") or c["rows"][0].update(centre=0.1)
    ),
    "columns.0='top1_equivalent': it needs margins.top1": lambda c: c.update(columns=["top1_equivalent"]),
    "equivalent: expected with columns <quantity>_equivalent": lambda c: c.update(
        margins={"top1": 1}, columns=["top1_equivalent"]
    ),
    "columns: a40_top1_mean: expected published numbers only, of a40": lambda c: c.update(
        hardware={"a40": "A40"}, columns=["a40_top1_mean"]
    ),
    "margins.top5: expected a column top5_equivalent": lambda c: c.update(margins={"top5": 1}),
    "margins.top1=0: expected greater than 0": lambda c: c.update(margins={"top1": 0}),
    "equivalent='alreduce': did you mean 'allreduce'?": lambda c: c.update(equivalent={"accumadam_aer": "alreduce"}),
    "equivalent: 'allreduce': expected another row": lambda c: c.update(equivalent={"allreduce": "allreduce"}),
    "baseline='allreduse': did you mean 'allreduce'?": lambda c: c.update(baseline="allreduse"),
    "target.best=...: missing; expected a value": lambda c: c.update(target={"metric": "accuracy", "value": 1}),
    "seeds.0=-1: expected greater than or equal to 0": lambda c: c.update(seeds=[-1]),
    "shown='accuracy': did you mean 'accuracy_mean'": lambda c: c.update(shown=["method", "accuracy"]),
    "columns: expected each once, got seeds more than once": lambda c: c.update(columns=["seeds", "seeds"]),
    "shown: expected each once, got seeds more than once": lambda c: c.update(columns=["seeds"], shown=["seeds"] * 2),
    "metric='acc'": lambda c: c.update(metric="acc"),
}


def test_a_wrong_file_is_refused_by_file_key_value_and_expectation(tmp_path):
    for message, change in BAD.items():
        write(tmp_path, change)
        with pytest.raises(UsageError) as caught:
            load_table("small", folder=tmp_path)
        assert "small.yaml: " in str(caught.value)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_table_makes_each_row_with_every_number_of_workers(tmp_path):
    table = load_table("small", folder=write(tmp_path, lambda c: c.update(workers=[4, 8])))
    names = ["allreduce_4", "allreduce_8", "accumadam_aer_4", "accumadam_aer_8"]
    assert [(row.name, row.workers) for row in table.rows] == list(zip(names, [4, 8, 4, 8], strict=True))
    cells = list(table.cells(Path("runs")))
    assert len(cells) == 12
    assert cells[4].overrides == [
        "experiment=small",
        "parallel=allreduce",
        "optimizer=adam",
        "workers.count=8",
        "seed=2",
        "run_dir=runs/small/allreduce_8/seed_2",
    ]


def test_unknown_names_and_broken_yaml(tmp_path):
    for content in (b"title: [1", b"title: caf\xe9", b"3", b"[" * 5000):
        (tmp_path / "broken.yaml").write_bytes(content)
        with pytest.raises(UsageError, match=r"^broken\.yaml: not valid YAML: [^\n]*$"):
            load_table("broken", folder=tmp_path)
    with pytest.raises(UsageError, match="figure=quikstart: unknown; did you mean 'quickstart'"):
        load_table("quikstart", key="figure")


def test_overrides_are_compared_by_meaning(table):
    cell = next(table.cells(Path("runs")))
    same = ["seed=1", "optimizer='adam'", "parallel=allreduce", "experiment=small"]
    assert cell.disagreement([*same, "run_dir=/else/where", "logging.progress=false", "resume=true"]) is None
    theirs = ["name=x", "data.folder=/scratch/x", "data.copy_to=/dev/shm", "training.device=cuda", "profile=true"]
    assert cell.disagreement([*same, *theirs]) is None
    assert cell.disagreement(["seed=2", *same[1:]]) == "seed: 2 there, 1 here"
    assert cell.disagreement(same[:3]) == "experiment: not set there, small here"
    assert cell.disagreement([*same, "optimizer.lr=1"]) == "optimizer.lr: 1 there, not set here"
    assert "expected one Hydra override" in cell.disagreement(["what"])
    assert parse_override("optimizer.lr=1e-3") == parse_override("optimizer.lr=0.001")


@pytest.mark.parametrize(
    ("key", "free"),
    [
        ("data.workers", True),
        ("data.folder", True),
        ("training.threads", True),
        ("data.seed", False),
        ("training.steps", False),
        ("elastic.keep", False),
    ],
)
def test_what_counts_in_no_table_is_free_when_a_run_is_resumed(table, key, free, tmp_path):
    same = ["experiment=small", "seed=1", "optimizer.lr=0.1"]
    cell = replace(next(table.cells(Path("runs"))), settings=tuple(same))
    assert (cell.disagreement([*same, f"{key}=5"]) is None) == free
    group, name = key.split(".")
    (tmp_path / "config.yaml").write_text(f"{group}: {{{name}: 4}}")
    now = SimpleNamespace(model_dump=lambda **_: {group: {name: 5}})
    assert compare(tmp_path / "config.yaml", now) == ([] if free else [f"{key}: 4 there, 5 now"])


def test_bookkeeping_that_a_table_sets_counts(table):
    cell = replace(next(table.cells(Path("runs"))), settings=("experiment=small", "data.folder=a", "seed=1"))
    assert cell.disagreement(["experiment=small", "data.folder=a", "seed=1"]) is None
    assert cell.disagreement(["experiment=small", "data.folder=b", "seed=1"]) == "data.folder: b there, a here"


def test_any_folder_becomes_a_valid_override(table):
    for folder in ("runs", "my runs", "a=b,c", "it's", "ü/é"):
        cell = next(table.cells(Path(folder)))
        assert parse_override(cell.overrides[-1]) == ("run_dir", f"{folder}/small/allreduce/seed_1")
