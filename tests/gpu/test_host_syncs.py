"""Between two rows of metrics the host never waits for the GPU, so that it runs ahead of it.

On CPUs, where nothing is waited for, reading a tensor's value counts.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from common.launch import rank as of_rank
from common.launch.processes import launch
from common.training.recorder import Recorder
from tests.gpu.device import Device, on_both, on_gpu, on_slow_cpu_too
from tests.gpu.groups import delayed_group
from tests.gpu.training import SmallTraining, short_run
from tests.host_sync import NoHostSync

CHECK = 3, "no step waits for the GPU"
WARMUP, STEPS = 10, 10  # a window of the optimizer and all rounds of a period come before
VERSIONS = list(itertools.product(("fp32", "bf16", "fp16"), (False, True)))  # fused or not


@contextlib.contextmanager
def no_host_sync(device: Device) -> Iterator[None]:
    """Raise in the block where the host waits for the GPU; on CPUs, where it reads a tensor."""
    if not device.on_gpu:
        with NoHostSync():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_the_debug_mode_sees_a_sync(device: Device) -> None:
    one = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError), no_host_sync(device):
        one.item()


def watch_steps(device: Device, precision: str, fused: bool) -> None:
    """Make steps of one of several workers, whose messages are copies on the GPU."""
    with delayed_group(4):
        training = SmallTraining(device, precision, fused, WARMUP + STEPS, {"topology": "one_peer_exponential"})
        training.run(range(WARMUP))
        with no_host_sync(device):
            training.run(range(WARMUP, WARMUP + STEPS))
        training.end()


@on_both
def test_steps_with_gossip(device: Device, figure: Callable[[str], None]) -> None:
    # On the CPU the compiler does not work in the mode, and one precision says it all.
    versions = VERSIONS if device.on_gpu else VERSIONS[:1]
    for precision, fused in versions:
        watch_steps(device, precision, fused)
    figure(f"none in {STEPS} steps of fp32, bf16, fp16 ({len(versions)} versions)")


def watch_run(device: Device, task: str, folder: Path) -> None:
    """Watch the training loop of a task."""
    step, train = Recorder.step, of_rank.train
    errors: list[BaseException] = []
    with contextlib.ExitStack() as watch:

        def watched(recorder: Recorder, *args: Any, **options: Any) -> None:
            step(recorder, *args, **options)
            if recorder.clock == WARMUP:
                watch.enter_context(no_host_sync(device))
            elif recorder.clock == WARMUP + STEPS:
                watch.close()

        def remembering(*args: Any) -> str:
            try:
                return train(*args)
            except BaseException as error:
                watch.close()
                errors.append(error)
                raise

        arguments = [*short_run(task, device, folder, WARMUP + STEPS + 1), "logging.every=1000"]
        with mock.patch.object(Recorder, "step", watched), mock.patch.object(of_rank, "train", remembering):
            code = launch(task, arguments)
    for error in errors:
        raise error
    assert code == 0


@pytest.mark.parametrize("task", ["gpt2", "cnn"])
@on_slow_cpu_too
def test_the_training_loop(device: Device, task: str, figure: Callable[[str], None], tmp_path: Path) -> None:
    watch_run(device, task, tmp_path)
    figure(f"none in {task}")
