"""Scripts that end in different ways; `python -m tests.distributed.ends` prints their exit codes and times.

Ranks are forked, but end as a script does, through the interpreter's end. Rank 0 makes its last step late, so that
messages of the others are on their way when these end.
"""

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

from common.parallel import DecentralizedDataParallel

TIMEOUT_S = 30.0
LATE_S = 0.6
TOPOLOGIES = {  # workers and workers per host
    "aer": (4, 2),
    "complete": (3, 1),
    "ring": (2, 1),
    "one_peer_ring": (1, 1),
}
# How rank 0 and the others end, and their exit codes.
ENDS = {
    "nothing": (0, 0),
    "destroy": (0, 0),
    "destroy, then close": (0, 0),
    "close, then destroy": (0, 0),
    "rank 0 raises, the others want to be requeued": (1, 75),
    "rank 0 dies": (9, 0),
    "a signal, close while it is handled": (75, 75),
}


def script(rank: int, n: int, topology: str, per_host: int, end: str, folder: str) -> None:
    """Train three steps and end."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    module = nn.Linear(200, 1000)
    model = DecentralizedDataParallel(module, topology, workers_per_host=per_host, timeout_s=TIMEOUT_S)
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model(torch.ones(1, 200)).square().mean().backward()
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
            for rank in range(n):
                pid = os.fork()
                if pid == 0:
                    script(rank, n, topology, per_host, end, here)
                    sys.exit()
                children[pid] = name, rank
        while children:
            pid, status = os.wait()
            name, rank = children.pop(pid)
            ended[name][rank] = os.waitstatus_to_exitcode(status), time.monotonic() - begin
    return ended


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
