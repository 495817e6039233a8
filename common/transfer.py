"""Copies to a device for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`. A GPU copies from pinned memory when it gets there; the host goes on."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
