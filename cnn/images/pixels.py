"""Normalising image bytes to network inputs."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Red, green and blue of ImageNet's training images, in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHANNELS = 3

MEAN_LEVEL, STD_LEVEL = (255 * np.array(value, dtype=np.float32) for value in (MEAN, STD))
LEVELS = tuple(MEAN_LEVEL.tolist()), tuple(STD_LEVEL.tolist())


def normalise(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Normalise uint8 [..., 3] to float32, in the calling thread only."""
    levels = image - MEAN_LEVEL
    levels /= STD_LEVEL
    return levels


def normalise_tensor(images: Tensor) -> Tensor:
    """Normalise uint8 [B, 3, H, W] to float32, keeping device and memory format."""
    return normalise_channels(images, *LEVELS)


def normalise_channels(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtract each channel's mean from uint8 [B, C, H, W] and divide by its deviation; float32 on the same device."""
    return images.float().sub_(_channels(mean, images.device)).div_(_channels(std, images.device))


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a number for each channel, [C, 1, 1] float32, made once: the host waits for copies of it."""
    return torch.tensor(values, device=device)[:, None, None]
