"""Read .beton files with FFCV.

Two things differ from FFCV's own loader. The order of an epoch comes from outside and holds tickets
(cnn.images.sampling) instead of plain indices; the decoders take the image's number and its crop from the ticket. And
an epoch may be abandoned or fail at any point, with several epochs open in one process.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import torch
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import IMAGE_MODES, ResizedCropRGBImageDecoder
from ffcv.libffcv import imdecode, resize_crop
from ffcv.loader import Loader
from ffcv.loader.epoch_iterator import EpochIterator
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.state import State
from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage

from cnn.images.beton import torch_threads_kept
from cnn.images.sampling import INDEX_MASK, Crop, Tickets
from cnn.images.tree import MEAN, STD, normalise_tensor
from common.training.task import Batch

BATCHES_AHEAD = 1  # waiting in the queue; one more is being made

# FFCV decodes a batch with all its threads, so decoding two at once would oversubscribe the CPU; and not all of numba's
# threading layers allow two callers.
decoding = threading.Lock()

compiled_imdecode, compiled_resize_crop = Compiler.compile(imdecode), Compiler.compile(resize_crop)


@numba.njit(nogil=True)
def mirror(image: np.ndarray) -> None:
    """Mirror an image [H, W, 3] in place."""
    height, width, channels = image.shape
    for row in range(height):
        for column in range(width // 2):
            for channel in range(channels):
                left = image[row, column, channel]
                image[row, column, channel] = image[row, width - 1 - column, channel]
                image[row, width - 1 - column, channel] = left


class CropDecoder(ResizedCropRGBImageDecoder):
    """Decoder of images that cuts out, resizes and mirrors the rectangle that `crop` draws for the ticket."""

    get_crop_generator = None  # FFCV's generator does not see the image's number

    def __init__(self, crop: Crop) -> None:
        super().__init__((crop.pixels, crop.pixels))
        self._crop = crop

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, AllocationQuery]:
        """Ask for the output alone, uint8 [B, H, W, 3]: each decoded image lives for one iteration of the loop."""
        shape, dtype = (*self.output_size, 3), np.dtype("u1")
        return replace(previous_state, jit_mode=True, shape=shape, dtype=dtype), AllocationQuery(shape, dtype)

    def generate_code(self) -> Callable:
        """Return FFCV's resized crop, with the rectangle drawn by ticket."""
        jpeg = IMAGE_MODES["jpg"]
        parallel_range, read = Compiler.get_iterator(), self.memory_read
        rectangle = numba.njit(self._crop.rectangle)

        def decode(tickets, destination, metadata, storage_state):  # noqa: ANN001, ANN202
            for i in parallel_range(len(tickets)):
                field = metadata[tickets[i] & INDEX_MASK]
                data = read(field["data_ptr"], storage_state)
                height, width = np.uint32(field["height"]), np.uint32(field["width"])
                if field["mode"] == jpeg:
                    image = np.empty((height, width, 3), np.uint8)
                    compiled_imdecode(data, image, height, width, height, width, 0, 0, 1, 1, False, False)
                else:
                    image = data.reshape(height, width, 3)
                top, left, h, w, flip = rectangle(tickets[i], np.int64(height), np.int64(width))
                compiled_resize_crop(image, top, top + h, left, left + w, destination[i])
                if flip:
                    mirror(destination[i])
            return destination[: len(tickets)]

        decode.is_parallel = True
        return decode


class LabelDecoder(IntDecoder):
    """Decoder of labels, [B, 1] int64."""

    def generate_code(self) -> Callable:
        """Return FFCV's decoder, with the image's number taken from the ticket."""

        def decode(tickets, destination, metadata, storage_state):  # noqa: ANN001, ANN202
            for i in range(len(tickets)):
                destination[i] = metadata[tickets[i] & INDEX_MASK]
            return destination[: len(tickets)]

        return decode


class Epoch(EpochIterator):
    """The batches of some tickets, decoded in a background thread.

    On the CPU a batch is a view of a buffer and valid until the next one is drawn. Unlike in FFCV's own iterator, an
    error in the thread reaches the reader, and PyTorch's number of threads stays as it is.
    """

    def __init__(self, loader: Loader, tickets: Tickets, device: torch.device) -> None:
        self._device = device
        self._target = torch.cuda.Stream(device) if device.type == "cuda" else None
        super().__init__(loader, tickets)

    def run(self) -> None:
        """Make batches until there are no more or the epoch is closed."""
        slots = self.loader.batches_ahead + 2
        try:
            numba.set_num_threads(self.loader.num_workers)
            for number, tickets in enumerate(self.iter_ixes):
                with decoding:
                    images, labels = self.run_pipeline(number, tickets, number % slots, None)
                if not self._hand_over(self._on_device(images, labels.flatten())):
                    return
            self._hand_over(None)
        except Exception as error:
            self._hand_over(error)

    def _on_device(self, images: torch.Tensor, labels: torch.Tensor) -> Batch:
        """Move a batch to the GPU as bytes, a quarter of the traffic, and normalise it there."""
        if self._target is None:
            return images, labels
        with torch.cuda.stream(self._target):
            moved, labels = (tensor.to(self._device, non_blocking=True) for tensor in (images, labels))
            batch = normalise_tensor(moved), labels
        self._target.synchronize()  # only this thread waits; afterwards the buffers may be reused
        return batch

    def _hand_over(self, item: Batch | Exception | None) -> bool:
        while not self.terminate_event.is_set():
            try:
                self.output_queue.put(item, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> Batch:
        """Return the next batch, or raise the error of the thread."""
        item = self.output_queue.get()
        if item is None:
            raise StopIteration
        if isinstance(item, Exception):
            raise item
        if self._target is not None:
            for tensor in item:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return item


class FfcvReader:
    """Reader of one .beton file; compiled code and open files are shared by all its epochs."""

    def __init__(self, file: Path, crop: Crop, threads: int) -> None:
        self._file, self._crop = file, crop
        self._threads = min(threads, numba.config.NUMBA_NUM_THREADS)
        self._loaders: dict[str, Loader] = {}  # by type of device

    def batches(self, tickets: Tickets, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield the tickets' images in batches; the last may be smaller. Nothing is opened before the first."""
        loader = self._loader(device)
        loader.batch_size = batch_size  # read when an epoch starts; the compiled code does not depend on it
        epoch = Epoch(loader, tickets, device)
        try:
            yield from epoch
        finally:
            epoch.close()

    def _loader(self, device: torch.device) -> Loader:
        if device.type not in self._loaders:
            self._loaders[device.type] = self._open(device)
        return self._loaders[device.type]

    def _open(self, device: torch.device) -> Loader:
        # On the CPU NormalizeImage must come before ToTensor; after it, FFCV's search for stages never ends.
        mean, std = (255 * np.array(value) for value in (MEAN, STD))
        normalised = [NormalizeImage(mean, std, np.float32)] if device.type == "cpu" else []
        images = [CropDecoder(self._crop), *normalised, ToTensor(), ToTorchImage()]
        with torch_threads_kept():
            loader = Loader(
                str(self._file),
                batch_size=1,  # each epoch has its own
                num_workers=self._threads,
                batches_ahead=BATCHES_AHEAD,
                seed=0,
                os_cache=True,
                drop_last=False,
                pipelines={"image": images, "label": [LabelDecoder(), ToTensor()]},
            )
        # Only FFCV's other cache needs these tables; they take hundreds of MB for ImageNet.
        manager = loader.memory_manager
        manager.ptr_to_size, manager.sample_to_pages, manager.page_to_samples = {}, {}, {}
        return loader
