"""The images that a rank draws in an epoch and their order, the same for both loaders."""

import numpy as np
import numpy.typing as npt

from cnn.images.augment import INDEX_BITS
from common.training.task import dealt

Tickets = npt.NDArray[np.uint64]


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

        offset: batches of the epoch, of all ranks, that were dealt before
        """
        order = np.random.default_rng([self._seed, epoch]).permutation(self._images)
        batches = order[: self.batches * self._batch_size].reshape(self.batches, -1)
        numbers = dealt(self.batches, self._rank, self._ranks, start, offset)
        return make_tickets(batches[numbers].reshape(-1), epoch)
