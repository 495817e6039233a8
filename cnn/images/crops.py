"""Crops: which part of an image training and validation see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cnn.images.augment import central_crop, flipped, random_resized_crop, sample_key

Rectangle = tuple[int, int, int, int, bool]  # top, left, height, width, mirrored


class Crop(Protocol):
    """How images are cut to squares with a side of `pixels`."""

    pixels: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """Return a function, which numba can compile, from (ticket, height, width) to the rectangle that is resized."""


@dataclass(frozen=True)
class RandomCrop:
    """A random part of the image, drawn by ticket.

    scale: smallest and largest area, as a fraction of the image's area
    flip:  whether half of the images are mirrored
    """

    pixels: int
    scale: tuple[float, float]
    flip: bool
    seed: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """Return a function from (ticket, height, width) to a random rectangle."""
        low, high, flip, seed = *self.scale, self.flip, np.uint64(self.seed)

        def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
            key = sample_key(seed, ticket)
            top, left, h, w = random_resized_crop(key, height, width, low, high)
            return top, left, h, w, flip and flipped(key)

        return rectangle


@dataclass(frozen=True)
class CentralCrop:
    """The central square of `pixels` after resizing the shorter side to `resize`."""

    pixels: int
    resize: int

    def function(self) -> Callable[[np.uint64, int, int], Rectangle]:
        """Return a function from (ticket, height, width) to the central rectangle."""
        fraction = self.pixels / self.resize

        def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
            top, left, h, w = central_crop(height, width, fraction)
            return top, left, h, w, False

        return rectangle
