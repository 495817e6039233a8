"""Which images a rank draws in an epoch, and which part of each: the same for both loaders.

Random crops and flips are plain Python that FFCV's compiled code can call. Their random numbers come from a counter,
not from a stateful generator: they are a pure function of the seed, the epoch and the image's number. Every loader,
thread, process and resumed run therefore draws the same crops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.training.task import dealt

try:
    from numba.extending import register_jitable
except ImportError:  # numba comes with FFCV; without it these are plain Python functions

    def register_jitable(function):  # noqa: ANN001, ANN201
        """Return the function unchanged."""
        return function


# A ticket identifies one draw: the image's number in the lower bits, the epoch above them.
INDEX_BITS = 32
INDEX_MASK = np.uint64(2**INDEX_BITS - 1)

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3, SHIFT_TO_53_BITS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)

Tickets = npt.NDArray[np.uint64]
Rectangle = tuple[int, int, int, int, bool]  # top, left, height, width, mirrored

TRIES = 10
RATIO = (3 / 4, 4 / 3)
LOG_RATIO = (math.log(RATIO[0]), math.log(RATIO[1]))


@register_jitable
def mix(x: np.uint64) -> np.uint64:
    """Apply splitmix64's finalizer; in Python, silence the intended overflow with `np.errstate(over="ignore")`."""
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    x = (x ^ (x >> SHIFT_2)) * FACTOR_2
    return x ^ (x >> SHIFT_3)


@register_jitable
def sample_key(seed: np.uint64, ticket: np.uint64) -> np.uint64:
    """Return the key of one image's random numbers in one epoch."""
    return mix(mix(seed + GOLDEN_GAMMA) + ticket)


@register_jitable
def uniform(key: np.uint64, number: int) -> float:
    """Return random number `number` of this key, uniform in [0, 1)."""
    return (mix(key + np.uint64(number + 1) * GOLDEN_GAMMA) >> SHIFT_TO_53_BITS) * 2.0**-53


@register_jitable
def flipped(key: np.uint64) -> bool:
    """Decide whether the image is mirrored, with probability 1/2."""
    return uniform(key, 4 * TRIES) < 0.5


@register_jitable
def random_resized_crop(key: np.uint64, height: int, width: int, low: float, high: float) -> tuple[int, int, int, int]:
    """Draw (top, left, height, width) as torchvision's RandomResizedCrop does (Inception's crop).

    The area is uniform in [low, high] times the image's, the aspect ratio log-uniform in RATIO. If ten draws do not
    fit into the image, the result is the largest central part with an allowed ratio.
    """
    area = height * width
    for attempt in range(TRIES):
        target = area * (low + (high - low) * uniform(key, 4 * attempt))
        aspect = math.exp(LOG_RATIO[0] + (LOG_RATIO[1] - LOG_RATIO[0]) * uniform(key, 4 * attempt + 1))
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniform(key, 4 * attempt + 2) * (height - h + 1))
            left = int(uniform(key, 4 * attempt + 3) * (width - w + 1))
            return top, left, h, w
    h, w = height, width
    if width < RATIO[0] * height:
        h = round(width / RATIO[0])
    elif width > RATIO[1] * height:
        w = round(height * RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


@register_jitable
def central_crop(height: int, width: int, fraction: float) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the central square whose side is `fraction` of the shorter side.

    With fraction = crop / resize, scaling this square to `crop` pixels is the same as resizing the shorter side to
    `resize` and cutting out the central `crop` pixels.
    """
    side = max(1, round(fraction * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


@dataclass(frozen=True)
class Crop:
    """How images are cut to squares with a side of `pixels`.

    rectangle: maps (ticket, height, width) to the part of the image that becomes the square; numba can compile it
    """

    pixels: int
    rectangle: Callable[[np.uint64, int, int], Rectangle]


def training_crop(pixels: int, scale: tuple[float, float], flip: bool, seed: int) -> Crop:
    """Return a crop that takes a random part of the image, drawn by ticket.

    scale: smallest and largest area, as a fraction of the image's area
    flip:  whether half of the images are mirrored
    """
    (low, high), run = scale, np.uint64(seed)

    def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
        key = sample_key(run, ticket)
        top, left, h, w = random_resized_crop(key, height, width, low, high)
        return top, left, h, w, flip and flipped(key)

    return Crop(pixels, rectangle)


def validation_crop(pixels: int, resize: int) -> Crop:
    """Return a crop that takes the central square of `pixels` after resizing the shorter side to `resize`."""
    fraction = pixels / resize

    def rectangle(ticket: np.uint64, height: int, width: int) -> Rectangle:
        top, left, h, w = central_crop(height, width, fraction)
        return top, left, h, w, False

    return Crop(pixels, rectangle)


def make_tickets(indices: npt.ArrayLike, epoch: int) -> Tickets:
    """Pack each image index and the epoch, which decides its augmentation, into one number."""
    return np.asarray(indices, dtype=np.uint64) | np.uint64(epoch << INDEX_BITS)


class EpochOrder:
    """One rank's share of every epoch.

    In every epoch one permutation of all images, drawn from (seed, epoch), is dealt to the ranks in local batches. So
    the global batches are the same for any number of ranks, and all ranks take the same number of steps. Images that
    do not fill a batch on every rank are left out of that epoch.

    Raises ValueError if there are fewer images than one global batch.
    """

    def __init__(self, images: int, rank: int, ranks: int, batch_size: int, seed: int) -> None:
        self._images, self._rank, self._ranks = images, rank, ranks
        self._batch_size, self._seed = batch_size, seed
        self.batches = images // batch_size
        self.steps = self.batches // ranks
        if self.steps == 0:
            raise ValueError(f"a global batch of {ranks} x {batch_size} images, but there are {images}")

    def tickets(self, epoch: int, start: int = 0, offset: int = 0) -> Tickets:
        """Return the tickets of this epoch's batches from number `start` on, [batches * batch_size].

        offset: batches of the epoch, over all ranks, that were dealt before
        """
        order = np.random.default_rng([self._seed, epoch]).permutation(self._images)
        batches = order[: self.batches * self._batch_size].reshape(self.batches, -1)
        numbers = dealt(self.batches, self._rank, self._ranks, start, offset)
        return make_tickets(batches[numbers].reshape(-1), epoch)
