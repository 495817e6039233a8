"""The default process group of programs that torchrun or srun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


def local_device() -> torch.device:
    """The GPU of this local rank, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def open_process_group(device: torch.device, timeout_s: float) -> None:
    """Opens the default group: NCCL among GPUs, gloo among CPUs; collectives fail after `timeout_s` seconds."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """The default group while the context lasts; gives this rank's device."""
    device = local_device()
    open_process_group(device, timeout_s)
    try:
        yield device
    finally:
        dist.destroy_process_group()
