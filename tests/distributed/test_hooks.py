"""Compressed all-reduce: what the hooks change, and what they must not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.parallel.allreduce import check_hook
from tests.distributed import models
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, in_process, simulated

BASE = Scenario(model=models.aligned, inputs=(16,), method="allreduce", steps=10)
HOOKS = {
    "fp16": 2.0**-11,  # relative error of rounding a gradient
    "powersgd": 1.0,
}


def parameters(results: list[dict]) -> np.ndarray:
    return np.concatenate([value.ravel() for value in results[0]["state"].values()])


def test_hooks_compress_and_keep_ranks_equal() -> None:
    """Plain all-reduce is the oracle: 16 bits are as near as their rounding, PowerSGD of full rank is the same."""
    whole = replace(BASE, options={"hook": "powersgd", "powersgd_rank": 16, "powersgd_from": 2})
    scenarios = [replace(BASE, options={"hook": hook, "powersgd_from": 2}) for hook in (None, *HOOKS)]
    ranks = run_processes(in_process, 3, [*scenarios, whole])
    plain, *compressed, same = ([rank[i] for rank in ranks] for i in range(len(scenarios) + 1))
    expected = parameters(plain)
    start = torch.cat([p.detach().ravel() for p in simulated(1, BASE).model.parameters()]).numpy()
    moved = np.linalg.norm(expected - start)
    np.testing.assert_allclose(parameters(same), expected, rtol=0, atol=1e-6)
    for (hook, tolerance), results in zip(HOOKS.items(), compressed, strict=True):
        error = np.linalg.norm(parameters(results) - expected) / moved
        assert 0 < error < tolerance, hook
        for other in results[1:]:
            np.testing.assert_array_equal(parameters([other]), parameters(results), err_msg=hook)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp8", 1, 2), "hook='fp8': expected one of fp16, powersgd"),
        (("powersgd", 0, 2), "powersgd_rank=0: expected a number of columns >= 1"),
        (("powersgd", 1, 1), "powersgd_from=1: expected a number of backward passes >= 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_hook(*arguments)
