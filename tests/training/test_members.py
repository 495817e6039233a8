"""Workers that leave and join: against a replay by hand, and resumed bit for bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cnn.data import InMemoryTrainData
from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.simulate import simulate
from common.training import worker_group
from common.training.members import config_of, donor_of, follow
from common.training.optimization import build_optimizer, build_schedule
from common.training.stream import RandomState, Stream
from common.training.task import dealt, load_task
from common.training.worker import Worker
from tests.distributed.comparison import assert_same
from tests.training.replay import replay
from tests.training.runs import rows, summary

CPU = torch.device("cpu")
BASE = ["workers=simulated", "workers.count=4", "model.width=8", "training.batch_size=32", "evaluation.every=100"]
BASE += ["topology=ring", "optimizer=accumadam", "logging.progress=false", "training.checkpoints_kept=9"]
BASE += ["optimizer.eps=1e-3"]  # with 1e-8 the first steps turn rounding, which differs by processor, into signs
LEAVE, JOIN = 7, 12
SCRIPT = [f"elastic.script=[{{step: {LEAVE}, leave: [1]}}, {{step: {JOIN}, join: [1]}}]", "training.steps=16"]


def train(*overrides: str) -> Path:
    assert launch("cnn", [*BASE, *overrides]) == 0
    return Path(next(text for text in overrides if text.startswith("run_dir=")).removeprefix("run_dir="))


def checkpoint(run: Path, step: int) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"step_{step:08d}" / "rank_0.pt", weights_only=True)


def parameters(state: dict[str, Any]) -> list[dict]:
    return [{name: tensor.numpy() for name, tensor in worker["model"].items()} for worker in state["workers"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which worker 1 leaves and comes back, with a checkpoint after every update."""
    run = tmp_path_factory.mktemp("elastic") / "run"
    return train(*SCRIPT, f"run_dir={run}", "training.checkpoint_every=1", "training.checkpoints_kept=20")


def test_those_who_stay_go_on_from_where_they_are(run: Path) -> None:
    """Oracle: three replicas with the checkpoint's states, on a ring of three, fed by hand with the next batches."""
    config = compose_config("cnn", [*BASE, *SCRIPT])
    task = load_task("cnn")(config)
    saved = checkpoint(run, LEAVE)
    assert saved["members"] == [0, 1, 2, 3]
    states = [saved["workers"][member] for member in (0, 2, 3)]
    replicas = simulate(task.build_model(), 3, topology="ring")
    optimizers = [r.attach(build_optimizer(config.optimizer, config.lr, r.module)) for r in replicas]
    for replica, optimizer, state in zip(replicas, optimizers, states, strict=True):
        replica.load_state_dict(state["model"])
        replica.load_clock(LEAVE)
        optimizer.load_state_dict(state["optimizer"])
    whole = task.train_data(0, 1, 8, CPU)  # one worker sees the epoch's batches one after the other
    randoms = [RandomState(0, CPU) for _ in states]
    for random, state in zip(randoms, states, strict=True):
        random.state = state["streams"][0]["random"]
    for step in range(LEAVE, JOIN):
        for i, (replica, random) in enumerate(zip(replicas, randoms, strict=True)):
            with random.active():
                batch = next(whole.epoch(0, 4 * LEAVE + 3 * (step - LEAVE) + i))
                replica.train()
                task.loss(replica, batch).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(run, step)
            optimizer.step()
            optimizer.zero_grad()
        expected = checkpoint(run, step + 1)
        assert expected["members"] == [0, 2, 3]
        for replica, got in zip(replicas, parameters(expected), strict=True):
            assert_same({name: t.numpy() for name, t in replica.state_dict().items()}, got, f"step {step + 1}")


def rate(run: Path, step: int) -> float:
    """Return the learning rate of the update after `step`, which the checkpoint's schedule has set."""
    return checkpoint(run, step)["workers"][0]["optimizer"]["param_groups"][0]["lr"]


def test_who_joins_begins_as_a_copy_of_a_neighbour(run: Path) -> None:
    before, after = checkpoint(run, JOIN), checkpoint(run, JOIN + 1)
    assert (before["members"], after["members"]) == ([0, 2, 3], [0, 1, 2, 3])
    assert donor_of(1, (0, 2, 3)) == 0
    assert donor_of(0, (1, 2)) == 2
    clocks = {worker["clock"] for worker in after["workers"]}
    assert clocks == {JOIN + 1}
    changes = [(r["step"], r["members"], r["left"], r["joined"]) for r in rows(run) if r["split"] == "membership"]
    assert changes == [(LEAVE, [0, 2, 3], [1], []), (JOIN, [0, 1, 2, 3], [], [1])]
    sent = [row["bytes_sent"] for row in rows(run) if row["split"] == "train"]
    assert sent == sorted(sent)
    assert [row["step"] for row in rows(run) if row["split"] == "train"] == [LEAVE, 10, JOIN, 16]


@pytest.mark.parametrize("step", [LEAVE, JOIN])
def test_resumed_around_a_change(run: Path, step: int, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    (again / "summary.json").unlink()
    for folder in (again / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    train(*SCRIPT, f"run_dir={again}", "training.checkpoint_every=1", "training.checkpoints_kept=20", "resume=true")
    for got, expected in zip(parameters(checkpoint(again, 16)), parameters(checkpoint(run, 16)), strict=True):
        assert_same(got, expected, "resumed")


def test_with_push_sum_workers_go_on_with_what_they_have(tmp_path: Path) -> None:
    """And with the weights of the next topology. Oracle: matrix products one row at a time, in a replay."""
    (tmp_path / "edges").write_text("0 1\n1 2\n2 3\n3 0\n0 2\n")
    graph = ["topology=file", f"topology.path={tmp_path / 'edges'}", "+topology.directed=true"]
    arguments = [*SCRIPT, "parallel=sgp", *graph, "+topology.weights=push_sum"]
    run = train(*arguments, f"run_dir={tmp_path / 'run'}", "training.checkpoint_every=16")
    expected = replay(compose_config("cnn", [*BASE, *arguments]), run, 16)
    for number, got in enumerate(parameters(checkpoint(run, 16))):
        wanted = {name: tensor.numpy() for name, tensor in expected[number].module.state_dict().items()}
        assert_same(got, wanted, f"worker {number}", rtol=1e-4, atol=2e-5)


def test_streams_go_on_with_the_sequence_of_batches() -> None:
    """Four streams, then three, then five take the batches in the order in which one stream takes them."""

    class Numbers:
        def __init__(self, rank: int, ranks: int) -> None:
            self.rank, self.ranks, self.batch_size = rank, ranks, 1
            self.batches_per_epoch, self.steps_per_epoch = 23, 23 // ranks

        def epoch(self, epoch: int, start: int = 0, offset: int = 0):
            return iter([(epoch, n) for n in dealt(23, self.rank, self.ranks, start, offset)])

    def streams(count: int, *dealing: Any) -> list[Stream]:
        return [Stream(Numbers(i, count), 0, i, CPU, count, *dealing) for i in range(count)]

    def draw(group: list[Stream], steps: int) -> list[tuple[int, int]]:
        return [next(stream) for _ in range(steps) for stream in group]

    four = streams(4)
    seen = draw(four, 3)
    three = streams(3, four[0].rest())
    seen += draw(three, 2)
    five = streams(5, three[0].rest())
    copies = streams(5)
    for copy, stream in zip(copies, five, strict=True):  # what a resumed run does
        copy.load_state_dict(stream.state_dict())
    rest = draw(five, 3)
    assert seen + rest[:5] == [(0, n) for n in range(23)]
    assert rest[5:] == [(1, n) for n in range(10)]
    assert draw(copies, 3) == rest
    assert five[0].epochs == pytest.approx(3 / 5 + 2 / 7 + 3 / 4)
    assert draw(five, 2)[:5] == [(1, n) for n in range(10, 15)]


def test_shares_of_another_size_take_every_sample_once() -> None:
    """Four streams take batches of 6, then three batches of 8; five begin with the first whole batch of 7 that is left.

    Images are their own numbers, in the order of the epoch.
    """
    images = torch.arange(100.0)

    def streams(count: int, size: int, *dealing: Any) -> list[Stream]:
        data = [InMemoryTrainData((images, images), i, count, size, 0, lambda image: image) for i in range(count)]
        return [Stream(one, 0, i, CPU, count, *dealing) for i, one in enumerate(data)]

    def draw(group: list[Stream], steps: int) -> list[float]:
        return [value for _ in range(steps) for stream in group for value in next(stream)[1].tolist()]

    four = streams(4, 6)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    assert draw(four, 1) == order[:24]
    three = streams(3, 8, four[0].rest())
    resumed = streams(3, 8)
    for one, other in zip(three, resumed, strict=True):
        other.load_state_dict(one.state_dict())
    assert draw(three, 1) == draw(resumed, 1) == order[24:48]
    five = streams(5, 7, three[0].rest())
    assert draw(five, 1) == order[49 : 49 + 35]
    following = draw(streams(2, 50, five[0].rest()), 1)  # nothing is left for a batch
    assert following != order
    assert sorted(following) == sorted(order)


def test_the_global_batch_can_stay() -> None:
    overrides = ["workers=simulated", "workers.count=8", "elastic.keep=global_batch", "training.batch_size=64"]
    config = compose_config("cnn", [*overrides, "training.gradient_accumulation=2", "optimizer.lr_batch=64"])
    assert config_of(config, (0, 1, 2, 5)).training.batch_size == 64
    assert config_of(config, (0, 1, 2, 5, 6)).training.batch_size == 60
    assert config_of(config, (0, 1, 2, 5, 6)).lr == pytest.approx(config.lr * 60 / 64)
    with pytest.raises(ConfigError, match=r"elastic\.keep=global_batch: expected local_batch: batches hold tokens"):
        compose_config("transformer", ["elastic.keep=global_batch"])


def test_hosts_topology_batch_and_rate_follow_the_members() -> None:
    hosts = ["workers=simulated", "workers.count=8", "workers.per_host=4", "topology=aer", "training.batch_size=64"]
    config = compose_config("cnn", [*hosts, "optimizer.lr=0.1", "optimizer.lr_batch=64"])
    assert config_of(config, tuple(range(8))) is config
    one_each = config_of(config, (0, 1, 2, 4, 5, 6))
    assert (one_each.n, one_each.workers.per_host, one_each.topology.name) == (6, 3, "aer")
    assert one_each.training.batch_size == 48
    assert one_each.lr == pytest.approx(0.075)
    uneven = config_of(config, (0, 1, 2, 3, 4))
    assert (uneven.n, uneven.workers.per_host) == (5, 1)
    cube = compose_config("cnn", [*hosts, "topology=hypercube", "elastic.fallback=ring"])
    assert config_of(cube, (0, 1, 2)).topology.name == "ring"
    assert config_of(cube, (0, 1, 2, 3)).topology.name == "hypercube"
    staggered = compose_config("cnn", [*hosts, "topology=one_peer_ring", "parallel.phases=staggered"])
    assert config_of(staggered, (0, 1, 2)).topology.name == "one_peer_exponential"  # rounds of odd rings do not commute


def test_the_rate_is_that_of_the_members_and_of_the_clock() -> None:
    """For a worker that missed an update too."""
    config = compose_config("cnn", [*BASE, "optimizer.lr=0.1", "optimizer.lr_batch=32", "schedule.warmup=10"])
    module = torch.nn.Linear(2, 2)
    worker = SimpleNamespace(optimizer=build_optimizer(config.optimizer, config.lr, module))
    worker.schedule = build_schedule(config.schedule, worker.optimizer, 100, 10)
    worker.optimizer.step()
    worker.schedule.step()
    follow(worker, config_of(config, (0, 1, 3)), 3)
    rates = [group["lr"] for group in worker.optimizer.param_groups]
    assert rates == pytest.approx([0.1 * 3 / 4 * 3 / 10] * len(rates))
    worker.schedule.step()
    assert worker.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 3 / 4 * 4 / 10)


def test_the_adamw_of_muon_keeps_its_own_rate() -> None:
    muon = ["optimizer=muon", "optimizer.adamw_lr=0.003", "optimizer.decay=independent", "schedule=constant"]
    config = compose_config("gpt2", [*BASE[:2], "training.batch_size=32", *muon])
    module = torch.nn.Module()
    module.layers, module.head = torch.nn.ModuleList([torch.nn.Linear(3, 3)]), torch.nn.Linear(3, 2)
    worker = SimpleNamespace(optimizer=build_optimizer(config.optimizer, config.lr, module))
    worker.schedule = build_schedule(config.schedule, worker.optimizer, 100, 10)
    worker.optimizer.step()
    before = [(group["lr"], group["weight_decay"]) for group in worker.optimizer.param_groups]
    follow(worker, config_of(config, (0, 1, 3)), 3)
    assert [(group["lr"], group["weight_decay"]) for group in worker.optimizer.param_groups] == before
    assert {rate for rate, _ in before} == {config.lr, 0.003}


def test_an_error_at_a_change_is_recorded_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first row and the first checkpoint."""
    build, times = worker_group.build_workers, iter(range(2))

    def build_once(*arguments: Any) -> list[Worker]:
        if next(times):
            raise ValueError("an argument that only the workers left have")
        return build(*arguments)

    monkeypatch.setattr(worker_group, "build_workers", build_once)
    assert launch("cnn", [*BASE, *SCRIPT, "logging.every=100", f"run_dir={tmp_path}/run"]) == 1
    assert summary(tmp_path / "run")["status"] == "failed"


REAL = ["elastic.script=[]", "workers=processes", "elastic=true"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=processes"], "elastic.script with workers=processes: expected workers=simulated"),
        (["elastic.script=[{step: 3, leave: [4]}]"], "elastic.script.0.leave=[4]: expected each once, and among"),
        (["elastic.script=[{step: 3, join: [2]}]"], "elastic.script.0.join=[2]: expected each once, and among"),
        (["elastic.script=[{step: 3, leave: [1]}, {step: 2, leave: [2]}]"], "script.1.step=2: expected a step after 3"),
        (["elastic.script=[{step: 3, leave: [0, 1, 2, 3]}]"], "expected at least one worker to stay"),
        (["elastic.fallback=rign"], "elastic.fallback='rign': expected 'complete', 'ring'"),
        (["topology=hypercube", "elastic.fallback=hypercube"], "topology=hypercube (workers=3, per_host=3)"),
        ([*REAL, "topology=hypercube", "elastic.fallback=hypercube"], "topology=hypercube (workers=3, per_host=3)"),
        ([*REAL, "topology=hypercube", "parallel.phases=staggered", "elastic.fallback=random_matching"], "no period"),
        (["data.partition=dirichlet"], "elastic.script with data.partition=dirichlet: expected data.partition=iid"),
        (
            ["data.partition=dirichlet", *REAL],
            "elastic.min_workers=2 with data.partition=dirichlet: expected data.partition=iid",
        ),
    ],
)
def test_impossible_changes_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("cnn", [*BASE, *SCRIPT[:1], *overrides])
    assert message in str(caught.value)
