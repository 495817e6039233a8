"""Messages travel while the model computes; the time of a step with buckets of different sizes.

The overlap is read from the profiler's trace: the share of the time of NCCL's kernels in which other kernels run too.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel
from common.parallel.collectives import gather_objects
from common.training.device import autocast
from gpt2.config import Shape
from gpt2.model import GPT2
from tests.gpu.device import Device, on_gpu, on_slow_cpu_too
from tests.gpu.training import GPT2_SMALL, Clock

CHECK = 9, "messages overlap computing"
SMALL = Shape(layers=1, heads=2, width=32, vocabulary=64, context=16)
WARMUP, TIMED, PROFILED = 8, 12, 4
SWEPT = [{"bucket_mb": size} for size in ("auto", 2.0, 8.0, 25.0, 64.0, 256.0)]
SWEPT += [{"transport": transport} for transport in ("send_recv", "subgroup")]
LEAST_OVERLAP = 0.5


class Steps:
    """Steps of a GPT-2 with gossip."""

    def __init__(self, device: Device, n: int, **options: Any) -> None:
        shape, batch = (GPT2_SMALL, 8) if device.on_gpu else (SMALL, 2)
        module = GPT2(shape).to(device.name)
        self._device = device
        self.model = DecentralizedDataParallel(module, workers_per_host=max(1, n // 2), **options)
        self._optimizer = self.model.attach(AccumAdamW(self.model.parameters(), fused=device.on_gpu))
        self._tokens = torch.randint(shape.vocabulary, (batch, shape.context + 1), device=device.name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            with autocast("bf16", torch.device(self._device.name)):
                loss = self.model(self._tokens[:, :-1], self._tokens[:, 1:])
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def milliseconds(rank: int, n: int, device: Device) -> list[float]:
    """Return the time of a step with each of the options, the mean over steps and ranks."""
    times = []
    for options in SWEPT:
        steps, clock = Steps(device, n, topology="aer", **options), Clock(device)
        steps.run(WARMUP)
        clock.mark()
        steps.run(TIMED)
        clock.mark()
        times.append(1000 * statistics.fmean(gather_objects(clock.seconds()[0] / TIMED)))
        steps.model.close()
    return times


def overlap_in_rank(rank: int, n: int, device: Device, topology: str, folder: Path) -> float:
    """Return the share of the messages' time in which other kernels run."""
    steps, trace = Steps(device, n, topology=topology), folder / f"{rank}.json"
    steps.run(WARMUP)
    device.settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps.run(PROFILED)
        device.settle()
    steps.model.close()
    profiler.export_chrome_trace(str(trace))
    return overlap_of(json.loads(trace.read_text())["traceEvents"])


def overlap_of(events: Iterable[dict[str, Any]]) -> float:
    """Return the share of the time of NCCL's kernels in which other kernels run; events of a Chrome trace."""
    borders = []  # time, how many messages and how many other kernels begin there
    for event in events:
        if event.get("cat") == "kernel":
            is_message = "nccl" in event["name"].lower()
            borders.append((event["ts"], is_message, not is_message))
            borders.append((event["ts"] + event["dur"], -is_message, -(not is_message)))
    times, messages, others = np.array(sorted(borders), dtype=float).T
    seconds, messages, others = np.diff(times), np.cumsum(messages)[:-1] > 0, np.cumsum(others)[:-1] > 0
    assert messages.any(), "the trace holds no kernel of NCCL"
    return seconds[messages & others].sum() / seconds[messages].sum()


@pytest.mark.parametrize("topology", ["one_peer_exponential", "aer"])
@on_gpu
def test_most_of_a_message_is_hidden(
    device: Device, topology: str, figure: Callable[[str], None], tmp_path: Path
) -> None:
    device.require_gpus(2)
    share = statistics.fmean(device.run(overlap_in_rank, device.ranks, topology, tmp_path, timeout=480))
    figure(f"messages overlap computing by {share:.2f} of their time, {topology}")
    assert share >= LEAST_OVERLAP


@on_slow_cpu_too
def test_sizes_of_buckets(device: Device, figure: Callable[[str], None]) -> None:
    device.require_gpus(2)
    times = device.run(milliseconds, device.ranks, timeout=480)[0]
    named = [f"{next(iter(options.values()))} {ms:.1f}" for options, ms in zip(SWEPT, times, strict=True)]
    figure(f"ms a step, buckets in MiB or transport: {', '.join(named)}")


def kernel(name: str, begin: float, end: float) -> dict:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_overlap_is_the_share_of_the_messages_time() -> None:
    others = [kernel("gemm", 0, 4), kernel("gemm", 3, 6), kernel("gelu", 8, 10), {"cat": "cpu_op", "name": "x"}]
    messages = [kernel("ncclDevKernel_SendRecv", 5, 9), kernel("ncclDevKernel_SendRecv", 5, 7)]
    assert overlap_of(others + messages) == pytest.approx(2 / 4)
    assert overlap_of([*others, kernel("ncclKernel_AllReduce", 6, 8)]) == 0
    with pytest.raises(AssertionError, match="no kernel of NCCL"):
        overlap_of(others)
