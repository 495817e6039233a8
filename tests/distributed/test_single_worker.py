"""One worker is plain PyTorch, bit for bit, with and without a process group."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from tests.distributed import models
from tests.distributed.comparison import assert_same
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import OPTIMIZERS, Scenario, in_process, snapshot
from tests.distributed.test_engine_equals_simulator import TOPOLOGIES

BASE = Scenario(topology="one_peer_exponential", steps=8)
CONV = replace(BASE, model=models.conv_bn, inputs=(3, 6, 6))
ATC = {"dmsgd", "dmsgd_local", "qg_dmsgd"}
SCENARIOS = [
    replace(BASE, optimizer=name, order="atc" if name in ATC else "awc", topology=topology)
    for name, topology in zip(OPTIMIZERS, cycle(TOPOLOGIES), strict=False)
]
SCENARIOS += [
    replace(CONV, optimizer="momentum"),
    replace(CONV, optimizer="accumadamw", accumulate=2, clip=0.1),
    replace(BASE, optimizer="adamw", method="allreduce", options={}),
    replace(BASE, optimizer="adamw", options={"message_dtype": torch.bfloat16, "transport": "subgroup"}),
]


def plain(scenario: Scenario) -> dict[str, np.ndarray]:
    """Train as a plain PyTorch script does."""
    model = scenario.build()
    optimizer = OPTIMIZERS[scenario.optimizer](model.parameters())
    for step in range(scenario.steps):
        for micro in range(scenario.accumulate):
            (scenario.loss(model, 0, step, micro) / scenario.accumulate).backward()
        if scenario.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.usefixtures("eager_kernel")
@pytest.mark.parametrize("process_group", [True, False])
def test_one_worker_is_plain_pytorch(process_group: bool) -> None:
    real = run_processes(in_process, 1, SCENARIOS)[0] if process_group else in_process(0, 1, SCENARIOS)
    for scenario, result in zip(SCENARIOS, real, strict=True):
        for kind in ("state", "mean"):
            assert_same(result[kind], plain(scenario), f"{scenario.optimizer} {kind}")
        assert result["distance"] == 0
        assert (result["counters"].bytes_sent, result["counters"].messages) == (0, 0)
        assert result["counters"].rounds == scenario.steps
