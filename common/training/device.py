"""What a process computes on and how: its device and threads, autocast, TF32, deterministic algorithms."""

import contextlib
import multiprocessing
import os

import torch

from common.config.base import MOST_PROCESSES
from common.config.config import Config, ConfigError, TrainingConfig
from common.parallel.process_groups import gpu_shortage, local_device
from common.rank_environment import DIGITS, from_launcher

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_device(config: Config, fixed_shapes: bool, distributed: bool) -> torch.device:
    """Set up PyTorch in this process as configured and return its device. Raises ConfigError as `pick_device` does.

    fixed_shapes: whether the task's batches have one shape
    distributed:  whether this is one of several processes
    """
    require_determinism(config.training.deterministic)
    device = pick_device(config)
    if device.type == "cuda":
        configure_gpu(config.training, fixed_shapes)
    simulated = config.workers.kind == "simulated" and device.type == "cpu"
    alone = simulated and not os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(config.training.threads or (1 if alone else threads_per_process(distributed)))
    return device


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass; a null one for fp32: entering even a disabled autocast costs time."""
    return torch.autocast(device.type, AUTOCAST[precision]) if precision in AUTOCAST else contextlib.nullcontext()


def require_determinism(required: bool) -> None:
    """Restrict PyTorch to deterministic algorithms, or lift the restriction. Must be called before CUDA starts.

    An operation without a deterministic form then raises a RuntimeError that names it.
    """
    if required:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; else cuBLAS is refused
    torch.use_deterministic_algorithms(required)


def configure_gpu(config: TrainingConfig, fixed_shapes: bool) -> None:
    """Set the precision of float32 matrix products and convolutions, and whether cuDNN benchmarks its algorithms.

    fixed_shapes: whether batches have one shape; benchmarking for each of many would take longer than it saves
    """
    # Of PyTorch 2.13's two ways, only this one can be read by all of torch.compile: after torch.backends.fp32_precision
    # its kernel selection fails when it reads the precision.
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32  # convolutions; PyTorch's own default is true
    torch.backends.cudnn.benchmark = fixed_shapes and not config.deterministic


def pick_device(config: Config) -> torch.device:
    """Return the configured device; each local process has its own GPU.

    With training.device=auto all processes use the CPU if there are too few GPUs. With cuda that raises ConfigError.
    """
    wanted = config.training.device
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda":
        shortage = gpu_shortage() if torch.cuda.is_available() else "no GPU is available"
        if shortage is not None:
            raise ConfigError(f"training.device=cuda: {shortage}; expected a GPU for each of them, or cpu or auto")
    return local_device()


def threads_per_process(distributed: bool) -> int:
    """Return OMP_NUM_THREADS, or the number of CPU threads with which the local processes together use each core once.

    torchrun sets the variable to 1 if the user has not set it: that value is ignored. Raises ConfigError for more
    threads than a run may have.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and multiprocessing.parent_process() is None and wanted == "1"
    if wanted.isdecimal() and wanted.strip("0") and not by_torchrun:
        if len(wanted) > DIGITS or int(wanted) > MOST_PROCESSES:
            raise ConfigError(f"OMP_NUM_THREADS={wanted} in the environment: expected at most {MOST_PROCESSES}")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (from_launcher("LOCAL_WORLD_SIZE") or 1 if distributed else 1))
