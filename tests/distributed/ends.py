"""Scripts that end in different ways; `python -m tests.distributed.ends` prints their exit codes and times.

Ranks are forked, but end as a script does, through the interpreter's end. Rank 0 makes its last step late, so that
messages of the others are on their way when these end.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import torch._dynamo  # once, before ranks are forked
import torch.distributed as dist
from torch import nn

from common.parallel import AllReduceDataParallel, DecentralizedDataParallel
from tests.waiting import LIMIT_S

TIMEOUT_S = 2 * LIMIT_S  # no end may wait for it
LATE_S = 0.6
ALLREDUCE = "all-reduce"
TOPOLOGIES = {  # workers and workers per host
    "aer": (4, 2),
    "complete": (3, 1),
    "ring": (2, 1),
    "one_peer_ring": (1, 1),
    ALLREDUCE: (2, 1),
}
# How rank 0 and the others end, and their exit codes.
ENDS = {
    "nothing": (0, 0),
    "destroy": (0, 0),
    "destroy, then close": (0, 0),
    "close, then destroy": (0, 0),
    "rank 0 raises, the others want to be requeued": (1, 75),
    "rank 0 dies": (9, 0),
    "rank 0 fails in backward, then closes": (1, 0),
    "a signal, close while it is handled": (75, 75),
}


def wait_for_end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.05)


def script(rank: int, n: int, topology: str, per_host: int, end: str, folder: str, first: int) -> None:
    """Train three steps and end; `first` is the process of rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    module = nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 200))
    if topology == ALLREDUCE:
        model = AllReduceDataParallel(module, bucket_mb=0.1, timeout_s=TIMEOUT_S)
    else:
        model = DecentralizedDataParallel(module, topology, workers_per_host=per_host, timeout_s=TIMEOUT_S)
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        loss = model(torch.ones(1, 200)).square().mean()
        if step == 2 and end.startswith("rank 0 fails"):
            if rank == 0:
                module[0].bias.register_hook(lambda _: 1 / 0)  # after messages of the second layer have left
            else:
                wait_for_end(first)  # it must not need their answer
        try:
            loss.backward()
        except ZeroDivisionError:
            model.close()
            raise
        if step == 2 and rank == 0:
            time.sleep(LATE_S)
        if step == 2 and rank == 0 and end == "rank 0 dies":
            os._exit(9)
        optimizer.step()
    if end == "destroy":
        dist.destroy_process_group()
    elif end == "destroy, then close":
        dist.destroy_process_group()
        model.close()
    elif end == "close, then destroy":
        model.close()
        dist.destroy_process_group()
    elif end.startswith("rank 0 raises"):
        if rank == 0:
            raise ValueError("an odd end")
        sys.exit(75)
    elif end.startswith("a signal"):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            model.close()
            sys.exit(75)


def main(only: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Return exit code and seconds of every rank of every script."""
    torch.set_num_threads(1)
    gc.freeze()  # else the end of each rank takes seconds
    folder = tempfile.mkdtemp()
    ended: dict[str, list[tuple[int, float]]] = {}
    for topology, (n, per_host) in TOPOLOGIES.items():
        children: dict[int, tuple[str, int]] = {}
        begin = time.monotonic()
        for end in ENDS:
            name = f"{topology}: {end}"
            if only and name not in only:
                continue
            ended[name] = [(-1, 0.0)] * n
            here = os.path.join(folder, name)
            os.mkdir(here)
            first = 0
            for rank in range(n):
                pid = os.fork()
                if pid == 0:
                    script(rank, n, topology, per_host, end, here, first)
                    sys.exit()
                first = first or pid
                children[pid] = name, rank
        while children:
            pid, status = os.wait()
            name, rank = children.pop(pid)
            ended[name][rank] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
    return ended


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
