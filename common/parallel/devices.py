"""Which device a local process computes on: one GPU per process, or the CPU for all of them."""

import os
import sys

import torch

from common.rank_environment import from_launcher


def local_device() -> torch.device:
    """Return the GPU of this local rank, made the current one, or the CPU where GPUs are missing.

    Where there are GPUs, but fewer than local processes, rank 0 says so.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    shortage = gpu_shortage()
    if shortage is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"notice: {shortage}; all of them compute on the CPU", file=sys.stderr, flush=True)
        return torch.device("cpu")
    device = torch.device("cuda", from_launcher("LOCAL_RANK") or 0)
    torch.cuda.set_device(device)
    return device


def gpu_shortage() -> str | None:
    """Return how many local processes there are for how many visible GPUs; None if each can have its own.

    The launcher announces the processes of this host as LOCAL_WORLD_SIZE.
    """
    processes = from_launcher("LOCAL_WORLD_SIZE") or (from_launcher("LOCAL_RANK") or 0) + 1
    gpus = torch.cuda.device_count()
    return f"{processes} local processes for {gpus} visible GPU{'s' * (gpus != 1)}" if processes > gpus else None
