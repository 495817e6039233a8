"""Check 9: messages travel while the model computes; the time of a step with buckets of different sizes.

The overlap is read from the profiler's trace: the share of the time of NCCL's kernels in which other kernels run too.
"""

import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel
from common.parallel.collectives import gather_objects
from common.training.numerics import autocast
from gpt2.model import GPT2, Shape
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.processes import run_ranks
from scripts.gpu_check.step_time import Clock

SHAPES = {
    "cuda": (Shape(layers=12, heads=12, width=768, vocabulary=50304, context=1024), 8),  # and the batch size
    "cpu": (Shape(layers=1, heads=2, width=32, vocabulary=64, context=16), 2),
}
WARMUP, TIMED, PROFILED = 8, 12, 4
TOPOLOGIES = ("one_peer_exponential", "aer")
BUCKETS_MB: tuple[float | str, ...] = ("auto", 2.0, 8.0, 25.0, 64.0, 256.0)
TRANSPORTS = ("send_recv", "subgroup")
LEAST_OVERLAP = 0.5

Interval = tuple[float, float]  # begin and end


def check(machine: Machine) -> str:
    """Measure the overlap of two topologies, then sweep sizes of buckets and transports on AER."""
    machine.require_gpus(2)
    n = 1 << (machine.ranks.bit_length() - 1)  # AER is defined for powers of two
    profiled: list[dict[str, Any]] = [{"topology": topology} for topology in TOPOLOGIES]
    swept: list[dict[str, Any]] = [{"topology": "aer", "bucket_mb": size} for size in BUCKETS_MB]
    swept += [{"topology": "aer", "transport": transport} for transport in TRANSPORTS]
    results = run_ranks(measure_in_rank, n, machine, profiled, swept, timeout_s=480)
    said = []
    if machine.on_gpu:  # the profiler sees no messages of CPUs
        shares = [statistics.fmean(rank[0][index] for rank in results) for index in range(len(profiled))]
        said.append(judge(dict(zip(TOPOLOGIES, shares, strict=True))))
    times = [f"{_named(options)} {ms:.1f}" for options, ms in zip(swept, results[0][1], strict=True) if ms is not None]
    return "; ".join([*said, f"ms a step: {', '.join(times)}"])


def judge(shares: dict[str, float]) -> str:
    """Return a sentence with the shares. Raises FailedError if one is below LEAST_OVERLAP."""
    said = ", ".join(f"{topology} {share:.2f}" for topology, share in shares.items())
    if min(shares.values()) < LEAST_OVERLAP:
        raise FailedError(f"messages overlap computing by {said} of their time, expected at least {LEAST_OVERLAP:g}")
    return f"messages overlap computing by {said} of their time"


def measure_in_rank(
    rank: int, n: int, machine: Machine, profiled: Sequence[dict[str, Any]], swept: Sequence[dict[str, Any]]
) -> tuple[list[float], list[float | None]]:
    """Return the overlaps, and milliseconds of a step (None where these options are unknown)."""
    shares = [Steps(machine, n, options).overlap() for options in profiled] if machine.on_gpu else []
    times: list[float | None] = []
    for options in swept:
        try:
            steps = Steps(machine, n, options)
        except (TypeError, ValueError) as error:
            print(f"{options}: {error}", flush=True)
            times.append(None)
        else:
            times.append(steps.milliseconds())
    return shares, times


class Steps:
    """Steps of a GPT-2 with gossip. options: of DecentralizedDataParallel, which raises what it raises."""

    def __init__(self, machine: Machine, n: int, options: dict[str, Any]) -> None:
        self._machine = machine
        shape, batch = SHAPES[machine.device]
        self._model = DecentralizedDataParallel(
            GPT2(shape).to(machine.device), workers_per_host=max(1, n // 2), **options
        )
        self._optimizer = self._model.attach(AccumAdamW(self._model.parameters(), fused=machine.on_gpu))
        self._tokens = torch.randint(shape.vocabulary, (batch, shape.context + 1), device=machine.device)

    def run(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            with autocast("bf16", torch.device(self._machine.device)):
                loss = self._model(self._tokens[:, :-1], self._tokens[:, 1:])
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def milliseconds(self) -> float:
        """Return the time of a step, the mean over steps and ranks. Collective, ends the communication."""
        self.run(WARMUP)
        clock = Clock(self._machine)
        clock.mark()
        self.run(TIMED)
        clock.mark()
        seconds = statistics.fmean(gather_objects(clock.seconds()[0] / TIMED))
        self._model.close()
        return 1000 * seconds

    def overlap(self) -> float:
        """Return the share of the messages' time in which other kernels run. Ends the communication."""
        self.run(WARMUP)
        self._machine.settle()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.run(PROFILED)
            self._machine.settle()
        self._model.close()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            return overlap_of(json.loads(trace.read_text())["traceEvents"])


def overlap_of(events: Iterable[dict[str, Any]]) -> float:
    """Return the share of the time of NCCL's kernels in which other kernels run; events of a Chrome trace.

    Raises FailedError if no kernel of NCCL is among them.
    """
    messages: list[Interval] = []
    others: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel":
            kernels = messages if "nccl" in event["name"].lower() else others
            kernels.append((event["ts"], event["ts"] + event["dur"]))
    if not messages:
        raise FailedError("the trace holds no kernel of NCCL")
    messages, others = union(messages), union(others)
    return length(intersection(messages, others)) / length(messages)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return what two lists of disjoint intervals in order have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def _named(options: dict[str, Any]) -> str:
    return options["transport"] if "transport" in options else f"{options['bucket_mb']} MiB"
