"""decent-dp behind the loop's contract: it trains as our gossip does, and what it cannot do is refused."""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from common.config.config import ConfigError
from common.launch.compose import compose_config
from common.parallel import DataParallel, DecentralizedDataParallel
from scripts.emulate.decent_dp import DecentDP, parallelize
from tests.distributed import models
from tests.distributed.processes import run_processes


def both(rank: int, n: int) -> list[list[np.ndarray]]:
    """Return what `train` does with decent-dp and with ours."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return [
        train(rank, lambda module: DecentDP(module, "complete", None)),
        train(rank, lambda module: DecentralizedDataParallel(module, "complete")),
    ]


def train(rank: int, wrap: Callable[[nn.Module], DataParallel]) -> list[np.ndarray]:
    """Return this rank's parameters and the mean model's after six steps, with a mean model in between."""
    torch.manual_seed(rank)
    module = models.mlp()
    model = wrap(module)
    optimizer = model.attach(torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1))
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / max(step, 1)  # the first gradient waits for the second step in decent-dp
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (2, 5):
            with model.averaged():
                mean = torch.cat([p.detach().ravel() for p in model.parameters()]).numpy()
    own = torch.cat([p.detach().ravel() for p in model.parameters()]).numpy()
    assert model.clock == 6
    assert model.consensus_distance() > 0
    model.close()
    return [own, mean]


def test_it_trains_as_our_gossip_does() -> None:
    pytest.importorskip("decent_dp")
    for theirs, ours in run_processes(both, 2):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel=allreduce"], "parallel=allreduce with engine=decent_dp: expected decentralized"),
        (["topology=ring"], "topology=ring with engine=decent_dp: expected complete, one_peer_ring"),
        (["topology=aer", "parallel.message_dtype=int8"], "message_dtype=int8 with engine=decent_dp: expected None"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    config = compose_config("cnn", ["workers.count=4", "workers.per_host=2", *overrides])
    with pytest.raises(ConfigError, match=message):
        parallelize(models.mlp(), config)
