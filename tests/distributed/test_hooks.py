"""Compressed all-reduce: what the hooks change, and what they must not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.parallel import AllReduceDataParallel
from tests.distributed import models
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, in_process, simulated

BASE = Scenario(model=models.Backwards, inputs=(16,), method="allreduce", steps=10)
HOOKS = {
    "fp16": 2.0**-11,  # relative error of rounding a gradient
    "powersgd": 1.0,
}


def parameters(results: list[dict]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in results[0]["state"].values()])


def test_hooks_compress_and_keep_ranks_equal() -> None:
    """Plain all-reduce is the oracle: 16 bits are as near as their rounding, PowerSGD of full rank is the same.

    With small buckets, too, whose collectives gloo must not mix up.
    """
    whole = replace(BASE, options={"hook": "powersgd", "powersgd_rank": 16, "powersgd_from": 2})
    scenarios = [replace(BASE, options={"hook": hook, "powersgd_from": 2}) for hook in (None, *HOOKS)]
    small = replace(whole, options=whole.options | {"bucket_mb": 0.0001})
    ranks = run_processes(in_process, 3, [*scenarios, whole, small])
    plain, *compressed, same, bucketed = ([rank[i] for rank in ranks] for i in range(len(scenarios) + 2))
    expected = parameters(plain)
    start = torch.cat([p.detach().ravel() for p in simulated(1, BASE).model.parameters()]).numpy()
    moved = np.linalg.norm(expected - start)
    for results in (same, bucketed):
        np.testing.assert_allclose(parameters(results), expected, rtol=0, atol=1e-6)
    for (hook, tolerance), results in zip(HOOKS.items(), compressed, strict=True):
        error = np.linalg.norm(parameters(results) - expected) / moved
        assert 0 < error < tolerance, hook
        for other in results[1:]:
            np.testing.assert_array_equal(parameters([other]), parameters(results), err_msg=hook)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hook": "fp8"}, "hook='fp8': expected 'fp16' or 'powersgd' or None"),
        ({"powersgd_rank": 0}, r"powersgd_rank=0: expected an integer in \[1, 1e\+13\] \(columns"),
        ({"powersgd_from": 1}, r"powersgd_from=1: expected an integer in \[2, 1e\+13\] \(backward passes; DDP"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllReduceDataParallel(torch.nn.Linear(1, 1), **arguments)
