"""Make .beton files, which FFCV reads, from folders of images by class, or data sets in memory from packages.

python -m cnn.prepare source=IMAGENET output=data/imagenet      (IMAGENET holds train/CLASS/* and val/CLASS/*)
python -m cnn.prepare source=digits output=data/digits          (scikit-learn's digits: no download)
python -m cnn.prepare source=mnist_5k                           (5,000 of MNIST's digits; or: source=openclipart)
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field, PositiveInt
from tqdm import tqdm

from cnn.digits import MEAN, STD, load_digits
from cnn.images.beton import BetonIndex, import_ffcv, index_file, read_index, write_index
from cnn.images.tree import ImageTree, check_same_classes, read_tree, readable
from cnn.packaged import IMAGES, make_packaged
from common.atomic import temporary
from common.cli import Arguments, Text, UsageError, main_function, parse
from common.config.base import Processes
from common.config.config import ConfigError
from common.interruptible import KilledError, interruptible
from common.locks import alone

MODULE = "cnn.prepare"
DIGITS_PIXELS = 32  # side of the digits as image files
DIGITS_VALIDATION = 0.2  # the split of configs/data/digits.yaml
ENCODING = ("resolution", "quality", "write_mode", "compress_probability")  # arguments of `Encoding`
SHOWN = 20  # broken files in an error; all of them are in the index


class PrepareArguments(Arguments):
    """Command line of cnn.prepare."""

    source: Text = Field(
        description="folder with subfolders named by `train` and `validation` (by default train and val), or digits, "
        "mnist_5k or openclipart"
    )
    output: Text | None = Field(
        None, description="folder for the .beton files (null: source; for mnist_5k and openclipart: data/<source>)"
    )
    archives: Text = Field("data/archives", description="folder for downloaded packages; existing ones are reused")
    train: Text = Field("train", description="subfolder of source with the training images; also names the .beton file")
    validation: Text = Field("val", description="subfolder of source for validation; also names the .beton file")
    resolution: PositiveInt | None = Field(500, description="longest side of a stored image in pixels; null: no limit")
    quality: Annotated[int, Field(ge=1, le=100)] = Field(90, description="JPEG quality")
    write_mode: Literal["jpg", "raw", "proportion"] = Field(
        "jpg", description="jpg: small | raw: fast | proportion: jpg with probability compress_probability, else raw"
    )
    compress_probability: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="see write_mode=proportion")
    corrupt: Literal["error", "skip"] = Field(
        "error", description="what to do with files that cannot be decoded or stored: error or skip"
    )
    workers: Processes | None = Field(None, description="number of processes (null: one per core)")
    images_only: bool = Field(False, description="source=digits: write only image files, for data.loader=torchvision")
    overwrite: bool = Field(False, description="replace existing files")


@main_function
@interruptible
def main(argv: Sequence[str]) -> int:
    """Check both folders, then write both files; exit code 2 for images that are missing or broken."""
    arguments = parse(PrepareArguments, argv, MODULE, "Convert folders of images, one per class, to .beton files.")
    if arguments.source in ("mnist_5k", "openclipart"):
        return prepare_packaged(arguments)
    digits = arguments.source == "digits"
    if digits and arguments.output is None:
        raise UsageError("output=...: missing; expected a folder for the digits")
    if arguments.images_only and not digits:
        raise UsageError(f"--images-only: source={arguments.source} is made of images already, expected source=digits")
    output, names = Path(arguments.output or arguments.source), (arguments.train, arguments.validation)
    folders = [(output if digits else Path(arguments.source)) / name for name in names]
    betons = [] if arguments.images_only else [output / f"{name}.beton" for name in names]

    def finished() -> list[Path]:
        """Return what leaves nothing to do, or would be replaced."""
        return (folders if digits else []) + (betons if all(file.exists() for file in betons) else [])

    refuse_existing(finished(), arguments.overwrite)
    if betons:
        os.environ["NUMBA_THREADING_LAYER"] = "workqueue"  # once forked, TBB's would keep this process from ending
        try:
            import_ffcv()
        except ImportError as error:
            raise UsageError(f"{error}{' (made with --images-only)' * digits}") from error
    with alone(output, key="output"):
        for dead in output.glob(".*.beton.*.part*"):  # left by killed processes
            dead.unlink(missing_ok=True)
        refuse_existing(finished(), arguments.overwrite)  # made while this one waited
        if digits:
            try:
                write_digits(*folders)
            except OSError as error:
                raise UsageError(f"output={output}: cannot be written ({error})") from error
        pairs = list(zip(read_trees(folders), betons, strict=False))
        todo = [(tree, beton) for tree, beton in pairs if arguments.overwrite or not is_made(tree, beton, arguments)]
        for tree, beton in reversed(todo):  # validation first: what is broken there is found before hours of training
            print(describe(beton, prepare(tree, beton, arguments)))
    return 0


def write_digits(train: Path, validation: Path) -> None:
    """Write scikit-learn's digits to FOLDER/<digit>/<number>.png in RGB, enlarged from 8 x 8 to 32 x 32 pixels.

    A folder appears only when it is complete, and replaces an older one.
    """
    for folder, (images, labels) in zip((train, validation), load_digits(DIGITS_VALIDATION), strict=True):
        part = temporary(folder, "part")
        try:
            for label in labels.unique().tolist():
                (part / str(label)).mkdir(parents=True)
            levels = ((images.squeeze(1) * STD + MEAN) * 255 / 16).round().byte()  # levels run from 0 to 16
            shown = tqdm(levels, folder.name, unit="image")
            for number, (pixels, label) in enumerate(zip(shown, labels, strict=True)):
                image = Image.fromarray(pixels.numpy()).resize((DIGITS_PIXELS, DIGITS_PIXELS), Image.Resampling.BICUBIC)
                image.convert("RGB").save(part / str(label.item()) / f"{number:04d}.png")
            shutil.rmtree(folder, ignore_errors=True)
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def prepare_packaged(arguments: PrepareArguments) -> int:
    """Make a data set in memory from its package."""
    output = Path(arguments.output or f"data/{arguments.source}")
    with alone(output, key="output"):
        refuse_existing([output / IMAGES], arguments.overwrite)
        try:
            record = make_packaged(arguments.source, output, Path(arguments.archives))
        except OSError as error:
            raise UsageError(f"output={output}: cannot be written ({error})") from error
    counts = ", ".join(f"{name} {count:,}" for name, count in record["classes"].items())
    print(f"{output}: {counts}; {record['validation']:,} of {sum(record['classes'].values()):,} for validation")
    print(" ".join(record["package"].values()))
    return 0


def refuse_existing(files: Sequence[Path], overwrite: bool) -> None:
    """Raise UsageError if any of the files exists, unless they may be overwritten."""
    there = [str(file) for file in files if file.exists()]
    if there and not overwrite:
        raise UsageError(f"{', '.join(there)}: there already; --overwrite makes it anew")


def read_trees(folders: Sequence[Path]) -> list[ImageTree]:
    """Read the training and validation folders.

    Raises UsageError if one has no images or their classes differ.
    """
    try:
        train, validation = (read_tree(folder) for folder in folders)
        check_same_classes(train.classes, validation.classes)
    except ValueError as error:
        raise UsageError(f"source={folders[0].parent}: {error}") from error
    return [train, validation]


def prepare(tree: ImageTree, beton: Path, arguments: PrepareArguments) -> BetonIndex:
    """Write a .beton file and its index; both appear only when they are complete."""
    from cnn.images.writer import Encoding, write_beton

    encoding = Encoding(**{name: getattr(arguments, name) for name in ENCODING})
    workers = arguments.workers or len(os.sched_getaffinity(0))
    part = temporary(beton, "part")
    broken: dict[str, str] = {}
    try:
        beton.parent.mkdir(parents=True, exist_ok=True)
        while (written := write_beton(tree, part, encoding, workers, beton.name)).broken:
            tree = without(tree, written.broken, arguments.corrupt)
            broken |= written.broken
        index = BetonIndex(
            classes=tree.classes,
            counts=[tree.labels.count(label) for label in range(len(tree.classes))],
            source=source_of(tree),
            converted=written.converted,
            skipped=sorted(map(readable, broken)),
            bytes=part.stat().st_size,
            **vars(encoding),
        )
        index_file(beton).unlink(missing_ok=True)
        part.replace(beton)
        write_index(beton, index)
    except KilledError:
        raise
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{beton}: cannot be written ({error})") from error
    finally:
        part.unlink(missing_ok=True)
    return index


def source_of(tree: ImageTree) -> str:
    """Return the folder of a tree as its index names it."""
    return readable(str(Path(tree.files[0]).parents[1].resolve()))


def is_made(tree: ImageTree, beton: Path, arguments: PrepareArguments) -> bool:
    """Decide whether an earlier call, which failed later, made this file; raise UsageError if another one is there."""
    if not beton.exists():
        return False
    with contextlib.suppress(ConfigError):
        index = read_index(beton)
        settings = {name: getattr(arguments, name) for name in ENCODING}
        wanted = settings | {"classes": tree.classes, "source": source_of(tree)}
        images = zip(tree.files, tree.labels, strict=True)
        kept = [label for file, label in images if readable(file) not in index.skipped]
        wanted |= {"counts": [kept.count(label) for label in range(len(tree.classes))]}
        *changes, made = (max(found.st_mtime, found.st_ctime) for found in map(os.stat, (*tree.files, beton)))
        allowed = arguments.corrupt == "skip" or not index.skipped
        if index.model_dump(include={*wanted}) == wanted and allowed and max(changes) <= made:
            print(f"{beton}: there already, made from the same images")
            return True
    refuse_existing([beton], overwrite=False)
    return False


def without(tree: ImageTree, broken: Mapping[str, str], corrupt: str) -> ImageTree:
    """Return the tree without the broken files.

    Raises UsageError naming them if they may not be skipped, or if no image of a class is left.
    """
    listed = [f"  {file}: {reason}" for file, reason in sorted(broken.items())]
    more = [f"  and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
    report = "\n".join(
        [f"{len(listed)} of {len(tree.files)} files cannot be decoded or stored:", *listed[:SHOWN], *more]
    )
    if corrupt == "error":
        raise UsageError(f"{report}\nremove them, or set corrupt=skip to go on without them")
    print(f"{report}\nwriting the file again without them", file=sys.stderr)
    kept = [(file, label) for file, label in zip(tree.files, tree.labels, strict=True) if file not in broken]
    empty = [name for label, name in enumerate(tree.classes) if label not in {label for _, label in kept}]
    if empty:
        raise UsageError(f"no image is left of {', '.join(empty[:5])}")
    return ImageTree(tree.classes, [file for file, _ in kept], [label for _, label in kept])


def describe(beton: Path, index: BetonIndex) -> str:
    """Return a one-line summary of the file written."""
    converted = [f"{count} {mode}" for mode, count in index.converted.items()]
    notes = [f"converted to RGB: {', '.join(converted)}"] * bool(converted)
    notes += [f"skipped: {len(index.skipped)}"] * bool(index.skipped)
    size = f"{index.bytes / 1e6:,.0f} MB"
    return "; ".join([f"{beton}: {index.images:,} images of {len(index.classes)} classes, {size}", *notes])


if __name__ == "__main__":
    sys.exit(main())
