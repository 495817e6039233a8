"""Write .beton files with FFCV's writer."""

import contextlib
import json
import multiprocessing
import queue
import sys
import time
from ctypes import c_uint64
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import cv2
from ffcv.fields import IntField, RGBImageField
from ffcv.memory_allocator import MemoryAllocator
from ffcv.writer import DatasetWriter, worker_job_indexed_dataset
from PIL import Image
from tqdm import tqdm

from cnn.images.tree import BROKEN, ImageTree, read_rgb
from common.interruptible import KilledError, unheard

CHUNK = 64  # images per job of a worker process
# Bytes. FFCV's limits are 2 MiB and 2 GiB, but it writes a page at once, and Linux writes a little less than 2 GiB.
SMALLEST_PAGE, LARGEST_PAGE = 2**21, 2**30
LARGEST_IMAGE = 2**27  # bytes of pixels, where the resolution is not limited
FORK = multiprocessing.get_context("fork")  # FFCV's fields cannot be pickled for Python 3.14's new processes
PLACEHOLDER = Image.new("RGB", (1, 1))  # FFCV needs an image in the place of a broken one


@dataclass(frozen=True)
class Encoding:
    """How images are stored.

    resolution:           longest side in pixels; larger images are reduced, None keeps their size
    quality:              of JPEGs, 1 to 100
    write_mode:           jpg, raw (pixels) or proportion (jpg with probability compress_probability, else raw)
    compress_probability: for write_mode=proportion
    """

    resolution: int | None
    quality: int
    write_mode: str
    compress_probability: float

    def field(self) -> RGBImageField:
        """Return FFCV's field for images stored this way."""
        return RGBImageField(
            write_mode=self.write_mode,
            max_resolution=self.resolution,
            jpeg_quality=self.quality,
            compress_probability=self.compress_probability,
        )

    def page_size(self) -> int:
        """Return the size of FFCV's pages in bytes, a power of two. No image spans two pages: the rest is wasted."""
        wanted = LARGEST_IMAGE if self.resolution is None else 8 * 3 * self.resolution**2
        return min(LARGEST_PAGE, max(SMALLEST_PAGE, 2 ** (wanted - 1).bit_length()))


@dataclass(frozen=True)
class Written:
    """What a pass over the images found.

    broken:    reason for each file that cannot be decoded or stored
    converted: number of images converted to RGB, by original mode
    """

    broken: dict[str, str]
    converted: dict[str, int]


class RgbImages:
    """The images of a tree as (RGB image, label), in the form that FFCV's worker processes ask for.

    Broken files and conversions are noted in a journal, one line each: appending a short line is atomic, so that all
    processes can share the file.
    """

    def __init__(self, tree: ImageTree, journal: Path) -> None:
        self._tree, self._journal = tree, journal
        self._file = ""  # read last by this process

    def __len__(self) -> int:
        return len(self._tree.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        self._file = file = self._tree.files[index]
        try:
            image, mode = read_rgb(file)
        except BROKEN as error:
            self.note_broken(error)
            image, mode = PLACEHOLDER, "RGB"
        if mode != "RGB":
            self._note({"mode": mode})
        return image, self._tree.labels[index]

    def note_broken(self, error: Exception) -> None:
        """Note that the image read last by this process cannot be stored."""
        self._note({"file": self._file, "error": " ".join(str(error).split())})

    def _note(self, note: dict[str, Any]) -> None:
        with self._journal.open("ab", buffering=0) as journal:
            journal.write(json.dumps(note).encode() + b"\n")


class Writer(DatasetWriter):
    """FFCV's writer, except that it fails when one of its processes fails."""

    def write(self, images: RgbImages, description: str) -> None:
        """Write all images. Raises RuntimeError on failure, such as a full disk, and KilledError for lack of memory."""
        name_what_cannot_be_encoded(self.fields["image"], images)
        self.num_samples = len(images)
        self.prepare()  # the header, and shared memory for the images' metadata
        chunks, done, allocations = FORK.Queue(), FORK.Value(c_uint64, 0), FORK.Queue()
        allocator = MemoryAllocator(self.fname, self.data_region_start, self.page_size)
        arguments = chunks, self.metadata_sm, self.metadata_type, self.fields, allocator, done, allocations, images
        processes = [FORK.Process(target=_work, args=arguments, daemon=True) for _ in range(self.num_workers)]
        try:
            with unheard():
                for process in processes:
                    process.start()
            numbered = [(index, index) for index in range(len(images))]
            for first in range(0, len(images), CHUNK):
                chunks.put(numbered[first : first + CHUNK])
            for _ in processes:
                chunks.put(None)
            # Fewer lines where the output goes to a file.
            interval = 0.5 if sys.stderr.isatty() else 20
            with tqdm(total=len(images), desc=description, unit="image", mininterval=interval) as progress:
                while done.value < len(images):
                    _check_alive(processes, allocations)
                    progress.update(done.value - progress.n)
                    time.sleep(0.1)
                progress.update(done.value - progress.n)
            self.finalize(_gather(processes, allocations))
        finally:
            for process in processes:
                process.kill()  # they block SIGTERM
            self.metadata_sm.close()
            self.metadata_sm.unlink()


def name_what_cannot_be_encoded(field: RGBImageField, images: RgbImages) -> None:
    """Count an image that FFCV cannot store as broken: too narrow to be reduced, or too large for a page."""
    encode = field.encode

    def encode_or_note(destination: Any, image: Image.Image, malloc: Any) -> None:
        try:
            encode(destination, image, malloc)
        except (cv2.error, ValueError, OverflowError) as error:
            images.note_broken(ValueError(f"{image.width} x {image.height} pixels cannot be stored ({error})"))
            encode(destination, PLACEHOLDER, malloc)

    field.encode = encode_or_note


def write_beton(tree: ImageTree, target: Path, encoding: Encoding, workers: int, description: str) -> Written:
    """Write the images of a tree to `target`, with a black pixel in place of each broken one.

    Images and labels keep the tree's order. Raises RuntimeError if writing fails, for example for lack of space.
    """
    journal = target.with_name(f"{target.name}.journal")
    journal.unlink(missing_ok=True)
    fields = {"image": encoding.field(), "label": IntField()}
    try:
        writer = Writer(str(target), fields, page_size=encoding.page_size(), num_workers=workers)
        writer.write(RgbImages(tree, journal), description)
        notes = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    finally:
        journal.unlink(missing_ok=True)
    modes = [note["mode"] for note in notes if "mode" in note]
    return Written(
        {note["file"]: note["error"] for note in notes if "error" in note},
        {mode: modes.count(mode) for mode in sorted(set(modes))},
    )


def _work(*arguments: Any) -> None:
    allocations = arguments[-2]
    try:
        worker_job_indexed_dataset(*arguments)
    except Exception as error:
        allocations.put(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _gather(processes: list[ForkProcess], allocations: multiprocessing.Queue) -> list[Any]:
    """Collect the allocations of all processes, each of which reports when it has written everything."""
    gathered = []
    while len(gathered) < len(processes):
        try:
            gathered.append(allocations.get(timeout=0.5))
        except queue.Empty:
            _check_alive(processes, allocations)
    return [allocation for of_process in gathered for allocation in of_process]


def _check_alive(processes: list[ForkProcess], allocations: multiprocessing.Queue) -> None:
    codes = [process.exitcode for process in processes if process.exitcode]
    if not codes:
        return
    reasons = []
    with contextlib.suppress(queue.Empty):
        while True:
            item = allocations.get(timeout=0.5)
            reasons += [item] if isinstance(item, str) else []
    if not reasons and codes[0] < 0:
        raise KilledError("workers")
    raise RuntimeError(reasons[-1] if reasons else f"a process ended with exit code {codes[0]}")
