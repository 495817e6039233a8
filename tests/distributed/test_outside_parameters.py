"""What the optimizer trains but gossip does not mix: a layer frozen when it was wrapped, another module, a number."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from common.optim import compiled
from common.parallel import DataParallel
from common.simulate import simulate
from tests.distributed import models
from tests.distributed.comparison import ATOL, RTOL
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import OPTIMIZERS, Scenario, wrap
from tests.naming import case

N, STEPS = 2, 9
SCENARIO = Scenario(model=models.frozen, topology="complete")


class Participant:
    """A worker: its model, what is trained beside it, and their optimizer.

    mixed, local: parameters that could be trained when the model was wrapped, and all others
    """

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        self.model = model
        self.mixed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        thawed = getattr(model, "module", model)[2].requires_grad_(True)
        torch.manual_seed(3)
        self.head, self.temperature = nn.Linear(3, 3), nn.Parameter(torch.ones(()))
        self.local = [*thawed.parameters(), *self.head.parameters(), self.temperature]
        self.optimizer = OPTIMIZERS[optimizer]([self.temperature, *model.parameters(), *self.head.parameters()])
        if isinstance(model, DataParallel):
            model.attach(self.optimizer)

    def backward(self, rank: int, step: int) -> None:
        x, y = SCENARIO.batch(rank, step)
        (self.head(self.model(x)) * self.temperature - y).square().mean().backward()

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.mixed + self.local]


def train(participants: Sequence[Participant], ranks: Sequence[int], mixes: bool = False) -> list[list[Tensor]]:
    """Return every participant's parameters after STEPS steps; mixes: average before each step."""
    for step in range(STEPS):
        for participant, rank in zip(participants, ranks, strict=True):
            participant.backward(rank, step)
        with torch.no_grad():
            for parameters in zip(*(p.mixed for p in participants if mixes), strict=True):
                mean = torch.stack(parameters).mean(0)
                for parameter in parameters:
                    parameter.copy_(mean)
        for participant in participants:
            participant.optimizer.step()
            participant.optimizer.zero_grad()
    return [participant.values() for participant in participants]


def bucket_by_bucket(rank: int, n: int) -> list[Tensor]:
    compiled.fused_kernel = compiled.written_kernel  # takes no time to compile
    participant = Participant(wrap(SCENARIO.build(), SCENARIO), "fused_accumadamw")
    assert participant.model._bucketwise is participant.optimizer
    (values,) = train([participant], [rank])
    participant.model.close()
    return values


def one_worker(rank: int, n: int) -> None:
    scenario = replace(SCENARIO, ranks_per_worker=n)
    participant = Participant(wrap(SCENARIO.build(), scenario), "sgd")
    with pytest.warns(UserWarning, match=r"parameter '2\.weight' is trained, but was frozen"):
        train([participant], [rank])
    participant.model.close()
    wrap(SCENARIO.build().requires_grad_(False), scenario).close()  # nothing for DDP to do


def test_ranks_of_one_worker_are_warned_too() -> None:
    run_processes(one_worker, 2)


@pytest.mark.usefixtures("eager_kernel")
def test_they_are_updated_like_any_other_but_not_mixed() -> None:
    """Fused, bucket by bucket in processes and at once in the simulator, against the plain version."""
    expected = train([Participant(SCENARIO.build(), "accumadamw") for _ in range(N)], range(N), mixes=True)
    start = Participant(SCENARIO.build(), "accumadamw").values()
    real = run_processes(bucket_by_bucket, N)
    replicas = simulate(SCENARIO.build(), N, topology="complete")
    simulated = train([Participant(replica, "fused_accumadamw") for replica in replicas], range(N))
    for rank in range(N):
        for engine, values in (("processes", real[rank]), ("simulator", simulated[rank])):
            for index, (value, wanted, old) in enumerate(zip(values, expected[rank], start, strict=True)):
                with case(engine, rank, index):
                    torch.testing.assert_close(value, wanted, rtol=RTOL, atol=ATOL)
                    assert (value - old).abs().max() > 1e-3
