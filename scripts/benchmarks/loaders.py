"""Measure how fast image loaders are: ours with FFCV, FFCV by itself, and ours with torchvision.

python -m scripts.benchmarks.loaders [images=768] [workers=2] [rounds=9] [output=results/benchmarks]

A loader decodes JPEGs of a photograph's size, cuts out a random part, resizes, mirrors and normalises it into float32
batches on the CPU; nothing is trained. The loaders of one setting take turns, an epoch each, in an order that rotates,
and ratios are taken within a round, so that a noisy machine slows all of them alike. The first batches of an epoch are
not timed: then buffers are new, which in an epoch of ImageNet's length does not matter.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from pydantic import Field, PositiveInt
from torch import Tensor

from cnn.images.crops import RandomCrop
from cnn.images.ffcv_import import import_ffcv
from cnn.images.order import make_tickets
from cnn.images.pixels import MEAN, STD
from cnn.images.tree import read_tree
from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.report.benchmark import Benchmark
from scripts.benchmarks.rounds import median_and_spread, rounds_in_turn

MODULE = "scripts.benchmarks.loaders"
HEIGHT, WIDTH, QUALITY = 375, 500, 90
BATCH, UNTIMED = 64, 6  # images; batches
FILES = 256  # an epoch goes through them several times
SCALE = (0.08, 1.0)

COLUMNS = {
    "pixels": "side of the square that is cut out",
    "loader": "bare: FFCV's own loader, decoder, flip and normalisation; ffcv, torchvision: ours (data.loader)",
    "images_per_s": f"images / duration of an epoch without its first {UNTIMED} batches, median over the rounds",
    "spread": "interquartile range of images_per_s over the rounds, in percent of the median",
    "ratio_to_bare": "images_per_s over that of `bare` in the same round, median over the rounds",
}
FORMATS = {"images_per_s": ",.0f", "spread": ".0f", "ratio_to_bare": ".3f"}

# numba stumbles when the garbage collector takes FFCV's own decoders away: they stay.
kept: list[object] = []

Epoch = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # the batches of an epoch


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.loaders."""

    pixels: Text = Field("176,224", pattern=r"^\d+(,\d+)*$", description="sides of the crops")
    images: int = Field(768, description=f"in an epoch; a multiple of {FILES}", multiple_of=FILES, gt=UNTIMED * BATCH)
    workers: PositiveInt = Field(2, description="CPU threads that decode")
    rounds: PositiveInt = Field(9, ge=2, description="epochs of each loader")
    output: Text = Field("results/benchmarks", description="where loaders.csv and loaders.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Make images, time the loaders, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time image loaders.")
    try:
        import_ffcv()
    except ImportError as error:
        raise UsageError(str(error)) from error
    benchmark = Benchmark("loaders", "Image loaders", COLUMNS, FORMATS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kilobytes = make_images(folder)
        rows = [row for size in arguments.pixels.split(",") for row in measure(folder, int(size), arguments)]
    text = [describe(kilobytes, arguments), conclude(pd.DataFrame(rows))]
    used, command = f"{arguments.workers} decode", command_of(MODULE, arguments)
    benchmark.write(rows, text, arguments.output, command, used, packages=("ffcv", "numba", "pillow"))
    return 0


def make_images(folder: Path) -> float:
    """Write JPEGs to folder/images/0 and folder/images.beton; returns their mean size in kB."""
    from cnn.images.writer import Encoding, write_beton

    files = folder / "images" / "0"
    files.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(FILES):
        synthetic_photograph(random).save(files / f"{number:05d}.jpg", quality=QUALITY)
    encoding = Encoding(resolution=max(HEIGHT, WIDTH), quality=QUALITY, write_mode="jpg", compress_probability=0.5)
    write_beton(read_tree(files.parent), folder / "images.beton", encoding, os.cpu_count() or 1, "images")
    return statistics.mean(file.stat().st_size for file in files.iterdir()) / 1000


def synthetic_photograph(random: np.random.Generator) -> Image.Image:
    """Noise with a photograph's spectrum (amplitude falls with frequency), which JPEG compresses like one."""
    pixels = np.zeros((HEIGHT, WIDTH, 3))
    for octave in range(2, 9):
        noise = Image.fromarray(random.integers(0, 256, (2**octave, 2**octave, 3), dtype=np.uint8))
        pixels += (np.asarray(noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) - 127.5) / 1.35**octave
    return Image.fromarray(np.clip(128 + pixels, 0, 255).astype(np.uint8))


def measure(folder: Path, pixels: int, arguments: BenchArguments) -> list[dict[str, object]]:
    """Return one row for each loader."""
    epochs = loaders(folder, pixels, arguments)
    timed = {name: lambda epoch, name=name: images_per_second(epochs[name](epoch)) for name in epochs}
    rates = rounds_in_turn(timed, arguments.rounds)
    rows = []
    for loader, values in rates.items():
        median, spread = median_and_spread(values)
        ratios = [value / bare for value, bare in zip(values, rates["bare"], strict=True)]
        rows.append(
            {
                "pixels": pixels,
                "loader": loader,
                "images_per_s": median,
                "spread": 100 * spread / median,
                "ratio_to_bare": statistics.median(ratios),
            }
        )
        print(" ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    return rows


def loaders(folder: Path, pixels: int, arguments: BenchArguments) -> dict[str, Epoch]:
    """Return the loaders that are compared, each as a function of the epoch."""
    from cnn.images.ffcv_loader import FfcvReader
    from cnn.images.torchvision_loader import TorchvisionReader

    workers, times = arguments.workers, arguments.images // FILES
    tree, crop = read_tree(folder / "images"), RandomCrop(pixels, SCALE, flip=True, seed=0)
    readers = {
        "ffcv": FfcvReader(folder / "images.beton", crop, workers),
        "torchvision": TorchvisionReader(tree, crop, workers),
    }

    def epoch_of(name: str) -> Epoch:
        return lambda epoch: readers[name].batches(shuffled(times, epoch), BATCH, torch.device("cpu"))

    return {
        "bare": bare_ffcv(folder / "images.beton", pixels, workers, times),
        **{name: epoch_of(name) for name in readers},
    }


def shuffled(times: int, epoch: int) -> np.ndarray:
    """Return every image several times, in another order in each epoch."""
    return make_tickets(np.random.default_rng(epoch).permutation(np.tile(np.arange(FILES), times)), epoch)


def bare_ffcv(file: Path, pixels: int, workers: int, times: int) -> Epoch:
    """Return FFCV's loader as its documentation has it, on the CPU."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

    mean, std = (255 * np.array(value) for value in (MEAN, STD))
    image = [RandomResizedCropRGBImageDecoder((pixels, pixels), SCALE), RandomHorizontalFlip()]
    image += [NormalizeImage(mean, std, np.float32), ToTensor(), ToTorchImage()]
    loader = Loader(
        str(file),
        BATCH,
        num_workers=workers,
        order=OrderOption.RANDOM,
        seed=0,
        indices=np.tile(np.arange(FILES, dtype=np.uint64), times),
        os_cache=True,
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor()]},
    )
    kept.append(loader)
    return lambda epoch: loader


def images_per_second(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Draw all batches; the first ones are not timed (in the first round they also compile)."""
    iterator = iter(batches)
    for _ in range(UNTIMED):
        next(iterator)
    start = time.perf_counter()
    images = sum(len(labels) for _, labels in iterator)
    return images / (time.perf_counter() - start)


def describe(kilobytes: float, arguments: BenchArguments) -> str:
    """Return what was measured."""
    return (
        f"{FILES} synthetic JPEGs of {WIDTH} x {HEIGHT} pixels and {kilobytes:.0f} kB (quality {QUALITY}), "
        f"in the page cache, {arguments.images} in an epoch; batches of {BATCH}; random crops of 8 to 100 % of the "
        "area, mirrored every other time, float32, normalised, on the CPU."
    )


def conclude(frame: pd.DataFrame) -> str:
    """Return what the measurement says."""
    ours, torchvision = (frame[frame.loader == loader] for loader in ("ffcv", "torchvision"))
    gains = ours.ratio_to_bare.to_numpy() / torchvision.ratio_to_bare.to_numpy()
    return (
        f"At {_listed(ours.pixels, '.0f')} pixels our FFCV loader is {_listed(ours.ratio_to_bare, '.2f')} times as "
        f"fast as FFCV by itself and {_listed(gains, '.1f')} times as fast as our torchvision loader."
    )


def _listed(values: Iterable[float], form: str) -> str:
    return " and ".join(f"{value:{form}}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
