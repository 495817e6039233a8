"""Checkpoints that survive being killed at any moment.

    checkpoints/step_00000120/rank_0.pt ...   one file for each process: all its state
                              manifest.json   written last: sizes and sha256 sums, the length of metrics.jsonl
    checkpoints/best.pt, last.pt              the mean model, a bare state dict
    checkpoints/models/step_00000120.pt ...   the mean models of the last evaluations, if they are kept

A folder without a manifest is an unfinished checkpoint and is ignored. Every file is written under a temporary name,
synced and renamed. All files are read with `torch.load(weights_only=True)`. Neither writing nor reading takes a copy of
the state in memory: bytes are hashed on their way into the file, and a file is mapped. A rank writes what it holds, its
shards where a model is sharded. That is also what torch.distributed.checkpoint does, but it reads its metadata with
pickle, which executes what it reads, and it has no checksums.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from common.parallel.collectives import gather_objects, rank
from common.training.atomic import describe, write_atomically

FORMAT = 3
MANIFEST = "manifest.json"
MODELS = "models"
SMALL = 1 << 16  # elements of a tensor


class CheckpointError(RuntimeError):
    """None of the existing checkpoints can be used; the message names the files and what is wrong with them."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete checkpoint.

    fingerprint:   of the configuration that wrote it
    metrics_bytes: length of metrics.jsonl at that step
    files:         {name: {"bytes": size, "sha256": hex}}, one for each process
    """

    format: int
    step: int
    fingerprint: str
    metrics_bytes: int
    files: dict[str, dict[str, Any]]


class Checkpoint(NamedTuple):
    """A complete checkpoint: its manifest, and the state that this rank wrote."""

    manifest: Manifest
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; every process makes this object and calls the same methods.

    folder:      RUN_DIR/checkpoints
    fingerprint: of the configuration; a checkpoint with another one is foreign
    keep:        how many of the newest to keep
    """

    def __init__(self, folder: Path, fingerprint: str, keep: int) -> None:
        self._folder, self._fingerprint, self._keep = folder, fingerprint, keep

    def save(self, step: int, state: dict[str, Any], metrics_bytes: int) -> None:
        """Write this process's state: nested dicts, lists and tuples of tensors and plain values.

        Collective. The checkpoint counts from the moment that rank 0 has renamed its manifest.
        """
        folder = self._folder / f"step_{step:08d}"
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # a killed run may have left files of this step
            folder.mkdir(parents=True)
        gather_objects(None)  # nobody writes into a folder that is being removed
        entries = gather_objects(write_atomically(folder / file_name(rank()), partial(torch.save, state)))
        if rank() == 0:
            files = {file_name(r): entry for r, entry in enumerate(entries)}
            manifest = Manifest(FORMAT, step, self._fingerprint, metrics_bytes, files)
            write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
            self._prune()

    def load(self, device: torch.device, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that is complete and undamaged on every rank; None if there never was one.

        device: where the state will go; its tensors are on the CPU, for a GPU in the mapped file
        tell:   called with a sentence for each damaged checkpoint that is skipped

        Collective. Raises CheckpointError if there are checkpoints but none can be used.
        """
        complaints: list[str] = []
        for folder in self._complete():
            try:
                found: Manifest | None = self._read(folder)
                problem = None
            except CheckpointError as error:
                found, problem = None, str(error)
            problems = [p for p in gather_objects(problem) if p]
            if found is not None and not problems:
                for complaint in complaints:
                    tell(f"{complaint}; using {folder.name} instead")
                return Checkpoint(found, read_state(folder / file_name(rank()), mapped=device.type != "cpu"))
            complaints += dict.fromkeys(problems)
        if complaints:
            raise CheckpointError("no usable checkpoint: " + "; ".join(complaints))
        return None

    def members(self) -> tuple[int, ...] | None:
        """Return the numbers of the workers in the newest complete checkpoint; None without one that can be read."""
        for folder in self._complete()[:1]:
            with suppress(OSError, RuntimeError, pickle.UnpicklingError):
                return tuple(read_state(folder / file_name(0), mapped=True)["members"])
        return None

    def save_model(self, name: str, state_dict: dict[str, Any]) -> None:
        """Write a mean model as `name`, "best.pt" or "last.pt". Called by rank 0 only."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / name, partial(torch.save, state_dict))

    def keep_model(self, step: int, state_dict: dict[str, Any], keep: int) -> None:
        """Write the mean model of an evaluation as models/step_<step>.pt; only the `keep` newest stay. Rank 0 only."""
        folder = self._folder / MODELS
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"step_{step:08d}.pt", partial(torch.save, state_dict))
        for file in sorted(folder.glob("step_*.pt"))[:-keep]:
            file.unlink()

    def _complete(self) -> list[Path]:
        """Folders with a manifest, newest first; the same list on all ranks."""
        folders = sorted((f.parent.name for f in self._folder.glob(f"step_*/{MANIFEST}")), reverse=True)
        return [self._folder / name for name in gather_objects(folders)[0]]

    def _read(self, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint whose file of this rank is as it was written."""
        manifest = read_manifest(folder / MANIFEST)
        if manifest.fingerprint != self._fingerprint:
            raise CheckpointError(f"{folder} is foreign: it was written with another configuration")
        file = folder / file_name(rank())
        try:
            found = describe(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
        if manifest.files.get(file.name) != found:
            raise CheckpointError(f"{file} is damaged: size or sha256 are not those of {MANIFEST}")
        return manifest

    def _prune(self) -> None:
        for name in sorted((f.parent.name for f in self._folder.glob(f"step_*/{MANIFEST}")), reverse=True)[
            self._keep :
        ]:
            (self._folder / name / MANIFEST).unlink()  # first: without it the rest does not count
            shutil.rmtree(self._folder / name, ignore_errors=True)  # NFS keeps files that some process has open


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises CheckpointError, which names the file, if it is not one."""
    try:
        manifest = Manifest(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not a manifest ({error})") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.format}, expected {FORMAT}")
    return manifest


def file_name(process: int) -> str:
    """Return the name of one process's file."""
    return f"rank_{process}.pt"


def read_state(file: Path, mapped: bool) -> dict[str, Any]:
    """Return what `torch.save` wrote, on the CPU; if `mapped`, large tensors are views of the file.

    What goes to a GPU is copied there from the mapped file. Optimizers keep tensors that they load, on the CPU all and
    on a GPU the counters of steps: these must not hold the file, or it would stay mapped as long as the run.
    """
    state = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    if not mapped:
        return state
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.numel() < SMALL else tensor, state)
