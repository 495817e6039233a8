"""Normalising image bytes to network inputs."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Red, green and blue of ImageNet's training images, in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHANNELS = 3

MEAN_LEVEL, STD_LEVEL = (255 * np.array(value, dtype=np.float32) for value in (MEAN, STD))


def normalise(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Normalise uint8 [..., 3] to float32, in the calling thread only."""
    levels = image - MEAN_LEVEL
    levels /= STD_LEVEL
    return levels


def normalise_tensor(images: Tensor) -> Tensor:
    """Normalise uint8 [B, 3, H, W] to float32, keeping device and memory format."""
    mean, std = (torch.from_numpy(value).to(images.device)[:, None, None] for value in (MEAN_LEVEL, STD_LEVEL))
    return images.float().sub_(mean).div_(std)
