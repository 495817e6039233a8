"""How precisely and how repeatably a run computes: autocast, TF32, deterministic algorithms."""

import contextlib
import os

import torch

from common.config.config import TrainingConfig

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass; none for fp32, as entering even a disabled autocast costs time."""
    return torch.autocast(device.type, AUTOCAST[precision]) if precision in AUTOCAST else contextlib.nullcontext()


def require_determinism(required: bool) -> None:
    """Have PyTorch use deterministic algorithms alone, or any; to be called before CUDA starts.

    An operation without a deterministic form then raises RuntimeError, which names it.
    """
    if required:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; else cuBLAS is refused
    torch.use_deterministic_algorithms(required)


def configure_gpu(config: TrainingConfig, fixed_shapes: bool) -> None:
    """Set what float32 means in matrix products and convolutions, and whether cuDNN tries its algorithms out.

    fixed_shapes: whether batches have one shape; a trial for each of many would take longer than it saves
    """
    # Of PyTorch 2.13's two ways this one can be read by all of torch.compile; after torch.backends.fp32_precision its
    # choice of kernels fails when it asks for the precision.
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32  # convolutions; PyTorch's own default is true
    torch.backends.cudnn.benchmark = fixed_shapes and not config.deterministic
