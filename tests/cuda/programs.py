"""What every rank of a training queues, for the matcher."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from common.flat import FlatVector
from common.options import GossipOptions
from common.parallel.gossip import Mixer, mixer
from common.parallel.process_groups import ProcessGroups
from common.topology import Topology, build
from tests.cuda.device import Trace

ELEMENTS = 32
BUCKET_MB = 16 * 4 / 2**20  # two buckets
STEPS = 2  # and the rounds launched after the last one


@dataclass(frozen=True)
class Program:
    """A training of `topology.world_size` workers.

    ranks_per_worker: above 1, DDP averages gradients inside workers in every backward
    start:     topology clock at which it starts
    by_bucket: whether the optimizer goes bucket by bucket
    after_backward: called in every step on every rank where the gradients are there
    """

    topology: Topology
    transport: str = "auto"
    phases: str = "aligned"
    ranks_per_worker: int = 1
    start: int = 0
    by_bucket: bool = True
    message_dtype: torch.dtype | None = None
    after_backward: Callable[[], object] = lambda: None


def traces_of(program: Program, here: SimpleNamespace) -> list[Trace]:
    """Run the program of every rank on the emulated device `here`; return what they queue."""
    size = program.topology.world_size * program.ranks_per_worker
    return [trace_of(program, here, Trace(rank, size)) for rank in range(size)]


def trace_of(program: Program, here: SimpleNamespace, trace: Trace) -> Trace:
    """Run one rank's program."""
    here.trace = trace
    groups = ProcessGroups(program.ranks_per_worker, timedelta(seconds=1))
    vector = FlatVector([("x", nn.Parameter(torch.zeros(ELEMENTS)))])
    with patch.object(mixer, "Watch", lambda timeout: SimpleNamespace(add=lambda *_: None, close=lambda: None)):
        gossip = Mixer(
            [vector],
            program.topology,
            groups,
            GossipOptions(bucket_mb=BUCKET_MB, phases=program.phases),
            transport=program.transport,
            message_dtype=program.message_dtype,
            timeout=timedelta(seconds=1),
        )
    gossip.set_clock(program.start)
    for step in range(program.start, program.start + STEPS):
        trace.label = f"step {step}"
        gossip.launch()
        for _ in range(2 if groups.within_worker is not None else 0):  # DDP's buckets
            dist.all_reduce(torch.zeros(4), group=groups.within_worker, async_op=True).wait()
        program.after_backward()
        if program.by_bucket:
            for _ in gossip.arriving():
                pass
        else:
            gossip.merge()
            gossip.launch()
    return trace


def topologies(sizes: Sequence[int], names: Sequence[str]) -> Iterator[Topology]:
    """Yield these topologies over these numbers of workers, on hosts of every size."""
    for name in names:
        for workers in sizes:
            for per_host in range(1, workers + 1):
                if workers % per_host == 0 and possible(name, workers, per_host):
                    yield build(name, workers, per_host)


def possible(name: str, workers: int, per_host: int) -> bool:
    """Return whether there is such a topology."""
    try:
        build(name, workers, per_host)
    except ValueError:
        return False
    return True
