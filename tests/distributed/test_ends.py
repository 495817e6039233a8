"""A script that ends without `close()`, or in the wrong order, ends with its own exit code; wrappers leave nothing."""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel
from tests.distributed.ends import ALLREDUCE, ENDS, TOPOLOGIES
from tests.distributed.models import mlp
from tests.distributed.processes import run_processes
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_scripts_end_with_their_own_exit_codes() -> None:
    names = [f"{topology}: {end}" for topology in TOPOLOGIES for end in ENDS]
    command = [sys.executable, "-m", "tests.distributed.ends", *names]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    codes = {name: [code for code, _ in ranks] for name, ranks in json.loads(ended.stdout.splitlines()[-1]).items()}
    expected = {}
    for name in names:
        topology, end = name.split(": ")
        (first, others), (n, _) = ENDS[end], TOPOLOGIES[topology]
        if topology == ALLREDUCE and "fails in backward" in end:
            others = 1  # they wait for rank 0's gradients
        expected[name] = [first] + [others] * (n - 1)
    assert codes == expected, ended.stderr


def wrapped_and_closed(rank: int, n: int) -> list[tuple[int, int, int]]:
    """Return the numbers of threads, descriptors and process groups after each wrapper."""

    def train(model: DataParallel) -> None:
        optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
        model.close()

    found = []
    for _ in range(3):
        train(DecentralizedDataParallel(mlp(), "aer", workers_per_host=2))
        train(DecentralizedDataParallel(mlp(), "complete", "atc", ranks_per_worker=2))
        train(AllReduceDataParallel(mlp()))
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("gossip")]
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_wrapping_and_closing_leaves_no_threads_descriptors_or_groups() -> None:
    for found in run_processes(wrapped_and_closed, 4):
        assert len(set(found[1:])) == 1, found
        assert found[0][2] == 1
