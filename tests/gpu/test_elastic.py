"""A GPU's process is killed in the middle of an exchange: the others go on, and another one takes its place."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.parallel import making_groups
from common.parallel.making_groups import groups_of_members
from common.torch_internals import can_reconfigure
from tests.distributed.processes import collect
from tests.gpu.device import Device, on_both, on_slow_cpu_too, program
from tests.ports import free_port

CHECK = 11, "GPUs lose and gain ranks"
TIMEOUT, LATE = timedelta(seconds=60), timedelta(minutes=5)  # of members, and until all processes have begun
MEMBERS = {0: [0, 1], 1: [0], 2: [0, 2]}  # of each membership; process 1 dies in the first one
WITHIN_S = 30.0


def require_reconfigure(device: Device) -> None:
    if not can_reconfigure(torch.device(device.name)):
        pytest.skip(f"torch {torch.__version__} cannot reconfigure process groups on {device.name}")


def changing(process: int, n: int, name: str, port: int) -> float:
    """Go through MEMBERS; return the seconds from an abort until what waited for the dead has ended."""
    if name == "cpu":
        dist.barrier()  # nobody closes connections that a slower rank still makes; NCCL has made none
    dist.destroy_process_group()
    device = torch.device(name, process % 2) if name == "cuda" else torch.device(name)
    if name == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=process == 0, wait_for_workers=False, timeout=LATE)
    groups = making_groups.current = groups_of_members("reconfigured", process, device)
    seconds = 0.0
    for number, members in MEMBERS.items():
        if process not in members:
            continue
        groups.open(dist.PrefixStore(str(number), store), number, members.index(process), len(members), TIMEOUT)
        group = groups.new(None, TIMEOUT)
        total = torch.full((1 << 20,), float(process), device=device)
        dist.all_reduce(total, group=group)
        assert total.unique().tolist() == [sum(members)]
        assert not groups.aborted()
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0:
            seconds = lose(total, group, groups, device)
        groups.end()
    dist.barrier()  # of the last members: the store is that of process 0
    return seconds


def lose(total: torch.Tensor, group: dist.ProcessGroup, groups: making_groups.NewGroups, device: torch.device) -> float:
    """Wait for the dead peer until a thread aborts, as on the agent's word."""
    aborted: list[float] = []

    def abort() -> None:
        time.sleep(2)
        aborted.append(time.monotonic())
        groups.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        dist.all_reduce(total, group=group)
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass  # gloo tells, and NCCL if it is asked
    ended = time.monotonic()
    thread.join()
    assert device.type == "cpu" or groups.aborted()
    return ended - aborted[0]


@on_both
def test_groups_lose_and_gain_a_rank(device: Device) -> None:
    device.require_gpus(2)
    require_reconfigure(device)
    outcomes = collect(changing, 3, (device.name, free_port()))
    assert [ok for ok, _ in outcomes] == [True, False, True], outcomes
    assert outcomes[0][1] < WITHIN_S


@on_slow_cpu_too
def test_a_run_goes_on_without_a_dead_worker(device: Device, tmp_path: Path) -> None:
    device.require_gpus(3)
    require_reconfigure(device)
    arguments = ["cnn.train", "task=tests.training.faulty", "name=kill", "workers.count=3", "topology=ring"]
    arguments += ["training.steps=40", "evaluation.every=40", "schedule.warmup=3", "logging.progress=false"]
    arguments += ["training.batch_size=48", "elastic.min_workers=2", "parallel.timeout_s=30", f"run_dir={tmp_path}/run"]
    arguments += [f"training.device={device.name}", "elastic.groups=reconfigured", "model.width=8"]
    code, output = program(*arguments, limit_s=240)
    assert code == 0, output[-2000:]
    assert re.search(r"worker 1 died \(SIGKILL\)", output), output[-2000:]
