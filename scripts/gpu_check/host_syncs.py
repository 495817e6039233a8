"""Check 3: between two rows of metrics the host never waits for the GPU, so that it runs ahead of it.

On CPUs, where nothing is waited for, reading a tensor's value counts.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.training import launch as launcher
from common.training.recorder import Recorder
from scripts.gpu_check.delayed import delayed_group
from scripts.gpu_check.outcome import FailedError, Machine
from scripts.gpu_check.small_runs import TASKS, own_line, steps_only
from scripts.gpu_check.small_training import SmallTraining

WARMUP, STEPS = 10, 10  # a window of the optimizer and all rounds of a period come before
WORKERS = 4
PRECISIONS, FUSED = ("fp32", "bf16", "fp16"), (False, True)


def check(machine: Machine) -> str:
    """Watch steps with gossip, its messages being copies on the GPU, and the training loop of each task."""
    if machine.on_gpu and not _notices_a_sync():
        raise FailedError("torch's debug mode overlooks .item()")
    complaints = []
    fused_or_not = FUSED if machine.on_gpu else (False,)  # the compiler does not work in the mode for CPUs
    for precision, fused in itertools.product(PRECISIONS, fused_or_not):
        complaints += watch_steps(machine, precision, fused)
    for task in TASKS:
        complaints += watch_run(machine, task)
    if complaints:
        raise FailedError("; ".join(complaints))
    versions = len(PRECISIONS) * len(fused_or_not)
    return f"none in {STEPS} steps of {', '.join(PRECISIONS)} ({versions} versions), and of {', '.join(TASKS)}"


def watch_steps(machine: Machine, precision: str, fused: bool) -> list[str]:
    """Return what waits for the GPU in steps of one of several workers; empty if nothing does."""
    with delayed_group(WORKERS):
        gossip: dict[str, object] = {"topology": "one_peer_exponential"}
        training = SmallTraining(machine.device, precision, fused, WARMUP + STEPS, gossip)
        training.run(range(WARMUP))
        try:
            with no_host_sync(machine):
                training.run(range(WARMUP, WARMUP + STEPS))
        except RuntimeError as error:
            return [f"{precision}, fused={fused}: {own_line(error)}"]
        training.close()
    return []


def watch_run(machine: Machine, task: str) -> list[str]:
    """Return what waits for the GPU in the training loop of a task; empty if nothing does."""
    step, train = Recorder.step, launcher.train
    errors: list[BaseException] = []
    with contextlib.ExitStack() as watch, tempfile.TemporaryDirectory() as folder:

        def watched(recorder: Recorder, *args: Any, **options: Any) -> None:
            step(recorder, *args, **options)
            if recorder.clock == WARMUP:
                watch.enter_context(no_host_sync(machine))
            elif recorder.clock == WARMUP + STEPS:
                watch.close()

        def remembering(*args: Any) -> str:
            try:
                return train(*args)
            except RuntimeError as error:
                watch.close()
                errors.append(error)
                raise

        steps = WARMUP + STEPS + 1
        arguments = [*steps_only(task, machine, folder, steps), "logging.every=1000"]
        with mock.patch.object(Recorder, "step", watched), mock.patch.object(launcher, "train", remembering):
            code = launcher.launch(task, arguments)
    if errors:
        return [f"{task}.train: {own_line(errors[0])}"]
    return [f"{task}.train ended with exit code {code}"] if code else []


@contextlib.contextmanager
def no_host_sync(machine: Machine) -> Iterator[None]:
    """Raise RuntimeError in the block where the host waits for the GPU; on CPUs, where it reads a tensor."""
    if not machine.on_gpu:
        with _NoReads():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{function} reads a tensor")
        return function(*args, **(kwargs or {}))


def _notices_a_sync() -> bool:
    machine, one = Machine("cuda"), torch.ones((), device="cuda")
    try:
        with no_host_sync(machine):
            one.item()
    except RuntimeError:
        return True
    return False
