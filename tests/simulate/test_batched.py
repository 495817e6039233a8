"""Workers that run as one batch, against workers that run one after the other."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.launch.processes import launch
from common.simulate import BatchedWorkers, SimulatedReplica, simulate

Batch = tuple[Tensor, Tensor]
RUN = ["workers=simulated", "workers.count=4", "model.width=8", "training.batch_size=32", "evaluation.every=100"]
RUN += ["topology=ring", "logging.progress=false", "training.steps=8"]
ADAM = ["optimizer=accumadamw", "optimizer.eps=1e-2"]  # whose first steps do not turn rounding into signs


class Net(nn.Module):
    """Convolution, statistics of the batch, a layer that is used twice, a frozen one, and one that is not used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(dropout)
        self.twice, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.conv(x)).relu().mean((2, 3)))
        return self.frozen(self.twice(self.twice(x)))


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def workers(count: int, **options: float) -> list[SimulatedReplica]:
    torch.manual_seed(0)
    replicas = simulate(Net(**options), count, topology="ring")
    for replica in replicas:
        replica.attach(torch.optim.SGD(replica.parameters(), lr=0.1))
    for replica in replicas[1:]:
        for parameter in replica.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return replicas


def batches(count: int) -> list[Batch]:
    return [(torch.randn(5, 3, 6, 6), torch.randint(4, (5,))) for _ in range(count)]


def test_gradients_losses_and_statistics_are_those_of_single_workers() -> None:
    batched, single = workers(3), workers(3)
    together = BatchedWorkers(batched, loss_of)
    for _ in range(2):  # gradients add up
        own = batches(3)
        losses = together.forward(own)
        together.backward(losses.sum() / 2)
        for replica, batch, loss in zip(single, own, losses, strict=True):
            expected = loss_of(replica, batch)
            (expected / 2).backward()
            torch.testing.assert_close(loss, expected)
    for got, expected in zip(batched, single, strict=True):
        for (name, parameter), other in zip(got.named_parameters(), expected.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), name
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, msg=name)
        for buffer, other in zip(got.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)


def test_workers_draw_different_random_numbers_a_function_of_the_seed() -> None:
    batch, drawn = batches(1)[0], []
    for seed in (1, 1, 2):
        replicas = workers(2, dropout=0.5)
        replicas[1].load_state_dict(copy.deepcopy(replicas[0].state_dict()))
        together = BatchedWorkers(replicas, loss_of)
        torch.manual_seed(seed)
        drawn.append(together.forward([batch, batch]).tolist())
    assert drawn[0][0] != drawn[0][1]
    assert drawn[0] == drawn[1] != drawn[2]


def test_rules_of_use_hold() -> None:
    replicas = workers(2)
    together = BatchedWorkers(replicas, loss_of)
    together.backward(together.forward(batches(2)).sum())
    replicas[0]._optimizers[0].step()
    with pytest.raises(RuntimeError, match="while others had stepped already"):
        together.forward(batches(2))


def models(folder: Path, *overrides: str) -> list[dict[str, Tensor]]:
    assert launch("cnn", [*RUN, f"run_dir={folder}", *overrides]) == 0
    state = torch.load(folder / "checkpoints" / "step_00000008" / "rank_0.pt", weights_only=True)
    return [worker["model"] for worker in state["workers"]]


@pytest.mark.parametrize(
    "method",
    [
        [*ADAM, "training.clip=0.5", "training.gradient_accumulation=2"],
        pytest.param([*ADAM, "optimizer.fused=true"], marks=pytest.mark.slow),
        pytest.param([*ADAM, "elastic.script=[{step: 4, leave: [1]}]"], marks=pytest.mark.slow),
        pytest.param(
            ["parallel=allreduce", "topology=complete", "optimizer=sgd", "optimizer.lr=0.02"], marks=pytest.mark.slow
        ),
    ],
)
def test_runs_are_the_same_up_to_rounding(method: list[str], tmp_path: Path) -> None:
    single = models(tmp_path / "single", *method)
    batched = models(tmp_path / "batched", *method, "workers.batched=true")
    for got, expected in zip(batched, single, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    arguments = ["workers.batched=true", "optimizer=accumadamw", "training.checkpoint_every=3"]
    whole = models(tmp_path / "whole", *arguments, "training.checkpoints_kept=9")
    (tmp_path / "whole").rename(tmp_path / "again")
    for late in ("step_00000006", "step_00000008"):
        for file in (tmp_path / "again" / "checkpoints" / late).iterdir():
            file.unlink()
        (tmp_path / "again" / "checkpoints" / late).rmdir()
    (tmp_path / "again" / "summary.json").unlink()
    resumed = models(tmp_path / "again", *arguments, "training.checkpoints_kept=9", "resume=true")
    for got, expected in zip(resumed, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (
            "cnn",
            ["workers=processes", "+workers.batched=true"],
            "with workers=processes: expected workers.batched=false",
        ),
        ("cnn", ["parallel.ranks_per_worker=2"], "with parallel.ranks_per_worker=2: expected workers.batched=false"),
        ("cnn", ["training.compile=true"], "with training.compile=true"),
        ("cnn", ["training.precision=fp16"], "with training.precision=fp16"),
        ("transformer", ["training.batch_size=4"], "expected false: the shapes of this task's batches differ"),
    ],
)
def test_what_cannot_be_batched_is_refused(task: str, overrides: list[str], message: str) -> None:
    simulated = ["workers=simulated", "workers.count=4", "workers.batched=true"]
    with pytest.raises(ConfigError) as caught:
        compose_config(task, [*(() if "workers=processes" in overrides else simulated), *overrides])
    assert "workers.batched=true" in str(caught.value)
    assert message in str(caught.value)


def test_a_worker_whose_parameters_were_replaced_is_noticed() -> None:
    replicas = workers(2)
    together = BatchedWorkers(replicas, loss_of)
    state = {name: tensor.clone() for name, tensor in replicas[1].state_dict().items()}
    replicas[1].module.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"worker 1: parameter 'conv.weight' is no longer a view"):
        together.forward(batches(2))


def test_buffers_that_were_replaced_are_the_ones_that_are_written() -> None:
    replicas = workers(2)
    together = BatchedWorkers(replicas, loss_of)
    replicas[1].module.norm.running_mean = torch.full((4,), 100.0)
    together.forward(batches(2))
    means = [replica.module.norm.running_mean for replica in replicas]
    assert means[0].abs().max() < 1
    torch.testing.assert_close(means[1], torch.full((4,), 90.0), atol=1.0, rtol=0)  # a tenth of the batch's
