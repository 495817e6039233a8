"""Read folders of images with torchvision and Pillow, where FFCV cannot be built."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from cnn.images.sampling import INDEX_MASK, Crop, Tickets
from cnn.images.tree import BROKEN, ImageTree, normalise, normalise_tensor, read_rgb
from cnn.torchvision_shim import torchvision
from common.training.task import Batch
from common.transfer import to_device

BATCHES_AHEAD = 2

functional = torchvision.transforms.functional


class TorchvisionReader:
    """Reader of one tree of images.

    Images are decoded by threads that all epochs of this reader share, so a simulation with many ranks in one process
    needs no more of them. Pillow releases Python's global lock while it decodes.
    """

    def __init__(self, tree: ImageTree, crop: Crop, threads: int) -> None:
        self._files, self._labels = tree.files, torch.tensor(tree.labels)
        self._crop = crop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="images")

    def batches(self, tickets: Tickets, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield the tickets' images in batches; the last may be smaller.

        Raises RuntimeError naming a file that cannot be read.
        """
        make = self._normalised if device.type == "cpu" else self._levels
        pending: deque[tuple[Tickets, list[Future[np.ndarray]]]] = deque()
        try:
            for first in range(0, len(tickets), batch_size):
                batch = tickets[first : first + batch_size]
                pending.append((batch, [self._pool.submit(make, ticket) for ticket in batch]))
                if len(pending) > BATCHES_AHEAD:
                    yield self._collate(*pending.popleft(), device)
            while pending:
                yield self._collate(*pending.popleft(), device)
        finally:
            for _, images in pending:
                for image in images:
                    image.cancel()

    def _levels(self, ticket: np.uint64) -> npt.NDArray[np.uint8]:
        """Decode and crop one image, [pixels, pixels, 3]."""
        file = self._files[ticket & INDEX_MASK]
        try:
            image, _ = read_rgb(file)
        except BROKEN as error:
            raise RuntimeError(f"{file}: cannot be read as an image ({error}); repair or remove it") from error
        with np.errstate(over="ignore"):  # the hash wraps around
            top, left, height, width, flip = self._crop.rectangle(ticket, image.height, image.width)
        image = functional.resized_crop(image, top, left, height, width, [self._crop.pixels] * 2)
        return np.asarray(functional.hflip(image) if flip else image)

    def _normalised(self, ticket: np.uint64) -> npt.NDArray[np.float32]:
        # Per image, not for the whole batch: PyTorch's threads would compete with these.
        return normalise(self._levels(ticket))

    def _collate(self, tickets: Tickets, futures: list[Future[np.ndarray]], device: torch.device) -> Batch:
        # [B, H, W, 3] viewed as [B, 3, H, W] is channels_last, like FFCV's batches.
        images = torch.from_numpy(np.stack([future.result() for future in futures])).permute(0, 3, 1, 2)
        labels = self._labels[torch.from_numpy((tickets & INDEX_MASK).astype(np.int64))]
        if device.type == "cpu":
            return images, labels
        # Normalised on the GPU, so that a quarter of the bytes are copied.
        moved, labels = (to_device(tensor, device) for tensor in (images, labels))
        return normalise_tensor(moved), labels
