"""The part of an image that training and validation see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cnn.images.augment import central_crop, flipped, random_resized_crop, sample_key

Rectangle = tuple[int, int, int, int, bool]  # top, left, height, width, mirrored


class Crop(Protocol):
    """Cuts images to squares of so many pixels."""

    pixels: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """From ticket, height and width of the image to the part that is resized; numba can compile it."""


@dataclass(frozen=True)
class RandomCrop:
    """A random part, by the ticket, of `scale` times the image's area; mirrored or not if `flip`."""

    pixels: int
    scale: tuple[float, float]
    flip: bool
    seed: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """See Crop."""
        low, high, flip, seed = *self.scale, self.flip, np.uint64(self.seed)

        def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
            key = sample_key(seed, ticket)
            top, left, h, w = random_resized_crop(key, height, width, low, high)
            return top, left, h, w, flip and flipped(key)

        return rectangle


@dataclass(frozen=True)
class CentralCrop:
    """The centre, as after resizing the shorter side to `resize` pixels."""

    pixels: int
    resize: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """See Crop."""
        fraction = self.pixels / self.resize

        def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
            top, left, h, w = central_crop(height, width, fraction)
            return top, left, h, w, False

        return rectangle
