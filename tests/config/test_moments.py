"""Half-lives, decay that stays when the learning rate moves, and what a run records of both."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from common.config.config import ConfigError
from common.config.moments import decay_sum, half_lives
from common.experiments.definitions import ROOT
from common.experiments.runs import read_run
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.optim.schedules import Cosine
from common.record.run_folder import compare, fingerprint
from common.training.optimization import build_optimizer
from tests.training.runs import rows, summary

BASE = ["workers=simulated", "workers.count=4", "training.batch_size=32"]
HALF_LIVES = ["optimizer.half_life.first=50", "optimizer.half_life.second=800"]


@pytest.mark.parametrize(
    ("task", "overrides", "batch"),
    [
        ("cnn", ["parallel=allreduce", "optimizer=adam"], 32),
        ("cnn", ["parallel=allreduce", "optimizer=accumadam", "optimizer.accumulation_steps=2"], 64),
        ("cnn", ["optimizer=adamw", "training.gradient_accumulation=2"], 8),
        ("cnn", ["optimizer=accumadamw", "optimizer.accumulation_steps=3"], 24),
        ("cnn", ["optimizer=adam", "workers.count=2", "parallel.ranks_per_worker=2"], 16),
        ("cnn", ["optimizer=adam", "parallel=diloco", "parallel.local_steps=5"], 8),
        ("gpt2", ["optimizer=adamw", "model.context=64"], 8 * 64),  # batches are sequences, half-lives tokens
        ("transformer", ["optimizer=adam"], 8),
    ],
)
def test_betas_follow_from_half_lives_and_the_batch_of_an_update(task: str, overrides: list[str], batch: int) -> None:
    config = compose_config(task, [*overrides[:1], *BASE, *overrides[1:], *HALF_LIVES])
    betas = (0.5 ** (batch / 50), 0.5 ** (batch / 800))
    assert config.optimizer.betas == betas
    assert half_lives(config) == {"half_life_first": pytest.approx(50), "half_life_second": pytest.approx(800)}


def test_one_half_life_leaves_the_other_beta() -> None:
    config = compose_config("cnn", [*BASE, "optimizer=adam", "optimizer.half_life.second=8"])
    assert config.optimizer.betas == (0.9, 0.5)
    both = [*BASE, "optimizer=adam", "optimizer.betas=[0.7,null]", "optimizer.half_life.second=8"]
    assert compose_config("cnn", both).optimizer.betas == (0.7, 0.5)


@pytest.mark.parametrize(
    ("overrides", "momentum", "first"),
    [
        (["optimizer=sgd", "optimizer.half_life.first=8"], 0.5, 8),
        (["optimizer=dmsgd", "parallel.order=atc", "optimizer.half_life.first=4"], 0.25, 4),
        (["optimizer=sgd"], 0.9, 8 * math.log(2) / -math.log(0.9)),
        (["optimizer=sgd", "optimizer.momentum=0"], 0, 0),
        # Of quasi-global momentum one update leaves mu + (1 - mu) beta.
        (["optimizer=qg_dmsgd", "parallel.order=atc", "optimizer.tracking=0.5", "optimizer.momentum=0.5"], 0.5, 19.275),
    ],
)
def test_momentum_has_a_half_life(overrides: list[str], momentum: float, first: float) -> None:
    config = compose_config("cnn", [*BASE, *overrides])
    assert config.optimizer.momentum == momentum
    expected = {"half_life_first": pytest.approx(first, rel=1e-4), "half_life_second": None}
    assert half_lives(config) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["experiment=gpt2_fair", "optimizer.half_life.second=9"],
            r"optimizer.betas=\[0.9,0.98\] with optimizer.half_life.second=9: .*; optimizer.betas=\[0.9,null\] leaves",
        ),
        (["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.half_life.first=9"], "optimizer.momentum=null leaves"),
        (
            ["optimizer=muon", "optimizer.momentum=0.9", "optimizer.half_life.first=9"],
            "optimizer.momentum=0.9 with optimizer.half_life.first=9",
        ),
        (["optimizer=sgd", "optimizer.half_life.second=9"], "optimizer.half_life.second=9 with optimizer=sgd"),
        (
            ["optimizer=qg_dmsgd", "parallel.order=atc", "optimizer.half_life.first=9"],
            "optimizer.half_life.first=9 with optimizer=qg_dmsgd: expected null",
        ),
        (["optimizer.half_life.first=0"], "optimizer.half_life.first=0: expected greater than 0"),
        (["optimizer=adam", "optimizer.decay=independent"], "optimizer.decay=independent with optimizer=adam"),
        (["optimizer=sgd", "optimizer.decay=independent"], "optimizer.decay=independent with optimizer=sgd"),
        (["parallel.share_second_moment=mean"], "share_second_moment=mean with workers=processes"),
        (
            ["parallel.share_second_moment=mean", *BASE, "optimizer=adamw"],
            "optimizer=adamw: expected workers=simulated",
        ),
        (["parallel=local_sgd", "parallel.share_second_moment=mean", *BASE], "expected a round in every update"),
    ],
)
def test_contradictions_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config("gpt2", overrides)


def test_muon_gives_both_of_its_parts_the_half_life_and_the_decay() -> None:
    layers = nn.Module()
    layers.list, layers.head = nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 2)
    overrides = ["optimizer=muon", "optimizer.half_life.first=8192", "optimizer.weight_decay=0.02"]
    config = compose_config("gpt2", [*overrides, "optimizer.decay=independent", "optimizer.adamw_lr=0.3"])
    groups = build_optimizer(config.optimizer, config.lr, layers).param_groups
    assert sorted({group["lr"] for group in groups}) == [0.001, 0.3]
    assert {round(group["lr"] * group["weight_decay"], 12) for group in groups} == {0.0, 0.02}
    assert {group.get("momentum", group.get("betas", (0,))[0]) for group in groups} == {0.5}


@pytest.mark.parametrize(("decay", "expected"), [("coupled", 0.1 * 0.004), ("independent", 0.1)])
def test_the_sum_of_decay_is_that_of_the_schedule(decay: str, expected: float) -> None:
    config = compose_config("gpt2", ["experiment=gpt2_fair", f"optimizer.decay={decay}"])
    factor = Cosine(warmup_steps=80, warmup_start=0.0, total_steps=2000, final_fraction=0.1)
    assert decay_sum(config, factor, 2000) == pytest.approx(expected * sum(factor(t) for t in range(2000)), rel=1e-12)


def test_a_run_with_these_keys_is_the_run_that_they_stand_for(tmp_path: Path) -> None:
    base = [*BASE, "optimizer=adamw", "optimizer.lr=0.003", "training.steps=6", "schedule.warmup=2", "model.width=4"]
    base += ["logging.every=1", "logging.progress=false", "training.threads=1"]
    new = [*HALF_LIVES, "optimizer.weight_decay=0.01", "optimizer.decay=independent"]
    old = [f"optimizer.betas=[{0.5 ** (8 / 50)!r},{0.5 ** (8 / 800)!r}]", f"optimizer.weight_decay={0.01 / 0.003!r}"]
    found: list[dict[str, Any]] = []
    for name, more in (("new", new), ("old", old)):
        assert launch("cnn", [*base, *more, f"run_dir={tmp_path / name}"]) == 0
        found.append(torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True))
    assert all(torch.equal(tensor, found[1][key]) for key, tensor in found[0].items())
    rates = [row["lr"] for row in rows(tmp_path / "new") if row["split"] == "train"]
    recorded = summary(tmp_path / "new")
    assert len(rates) == 6
    assert recorded["decay_sum"] == pytest.approx(0.01 * sum(rates) / 0.003)
    assert (recorded["half_life_first"], recorded["half_life_second"]) == (pytest.approx(50), pytest.approx(800))


def test_runs_from_before_these_keys_existed_have_the_same_configuration(tmp_path) -> None:
    run = read_run(ROOT / "results" / "runs" / "gpt2_fair" / "dadam_complete" / "seed_4")
    recorded = run.environment["overrides"]
    OmegaConf.save(run.config, tmp_path / "config.yaml")
    config = compose_config("gpt2", recorded)
    added = ("optimizer.decay", "optimizer.half_life", "optimizer.betas", "parallel.share_second_moment")
    assert not [line for line in compare(tmp_path / "config.yaml", config) if line.startswith(added)]
    typed = [*recorded, "optimizer.decay=coupled", "optimizer.half_life.first=null"]
    assert fingerprint(compose_config("gpt2", typed)) == fingerprint(config)
