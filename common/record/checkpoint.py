"""Checkpoints that survive being killed at any moment.

    checkpoints/step_00000120/rank_0.pt ...   one file for each process: all its state
                              manifest.json   written last: sizes and sha256 sums, the length of metrics.jsonl
    checkpoints/best.pt, last.pt              the mean model, a bare state dict
    checkpoints/models/step_00000120.pt ...   the mean models of the last evaluations, if they are kept

A folder without a manifest is an unfinished checkpoint: it is ignored, and removed at the next save. If a checkpoint
of the same step exists already, the new one's files are called rank_0_again.pt ..., and the manifest names the valid
ones. Every file is written under a temporary name, synced and renamed. All .pt files are read with
`torch.load(weights_only=True)`. Writing makes no copy of the state in memory: bytes are hashed on their way into the
file. Nor does reading for a GPU, which maps the file. A rank writes what it holds: its shards if the model is sharded.
torch.distributed.checkpoint does the same, but it reads its metadata with pickle, which executes what it reads, and it
has no checksums.
"""

import errno
import json
import pickle
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.atomic import describe, write_atomically
from common.cli import one_line
from common.config.config import ConfigError
from common.parallel.collectives import gather_objects, rank
from common.record import FOLDERS
from common.torch_internals import tree_map_only

FORMAT = 3
MANIFEST = "manifest.json"
MODELS = "models"
AGAIN = "_again"
SMALL = 1 << 16  # elements of a tensor
SHOWN = 300  # characters of a torch error


class CheckpointError(RuntimeError):
    """None of the existing checkpoints can be used; the message names the files and what is wrong with them."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete checkpoint.

    fingerprint:   of the configuration that it was written with
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
    also:        fingerprints of the same configuration that earlier versions wrote
    """

    def __init__(self, folder: Path, fingerprint: str, keep: int, also: Collection[str] = ()) -> None:
        self._folder, self._fingerprint, self._keep = folder, fingerprint, keep
        self._own = {fingerprint, *also}

    def save(self, step: int, state: dict[str, Any], metrics_bytes: int) -> None:
        """Write this process's state: nested dicts, lists and tuples of tensors and plain values.

        Collective. The checkpoint counts from the moment that rank 0 has renamed its manifest; until then, an existing
        one of the same step does.
        """
        folder, suffix = self._folder / f"step_{step:08d}", ""
        if rank() == 0:
            self._tidy()
            self._make(folder)
            suffix = AGAIN if file_name(0) in files_of(folder) else ""
        suffix = gather_objects(suffix)[0]  # no rank writes before this
        name = file_name(rank(), suffix)
        entries = gather_objects(write_atomically(folder / name, partial(torch.save, state)))
        if rank() == 0:
            files = {file_name(r, suffix): entry for r, entry in enumerate(entries)}
            manifest = Manifest(FORMAT, step, self._fingerprint, metrics_bytes, files)
            write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
            self._prune(step)

    def load(self, device: torch.device, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that is complete and undamaged on every rank; None if there never was one.

        device: where the state will go; its tensors are on the CPU, in the mapped file if it will go to a GPU
        tell:   called with a sentence for each damaged checkpoint that is skipped

        Newer checkpoints that are damaged are removed. Collective. Raises CheckpointError if there are checkpoints but
        none can be used.
        """
        complaints: list[str] = []
        damaged: list[Path] = []
        for folder in self._complete():
            try:
                found: Manifest | None = self._read(folder)
                problem = None
            except CheckpointError as error:
                found, problem = None, error
            problems = [p for p in gather_objects(problem and (str(problem), isinstance(problem, DamagedError))) if p]
            if found is not None and not problems:
                for complaint in complaints:
                    tell(f"{complaint}; using {folder.name} instead")
                for other in damaged if rank() == 0 else []:
                    remove(other)
                return Checkpoint(found, read_state(folder / own_file(found), mapped=device.type != "cpu"))
            complaints += dict.fromkeys(text for text, _ in problems)
            if any(is_damaged for _, is_damaged in problems):
                damaged.append(folder)
        if complaints:
            raise CheckpointError("no usable checkpoint: " + "; ".join(complaints))
        return None

    def members(self) -> tuple[int, ...] | None:
        """Return the numbers of the workers in the newest complete checkpoint; None without one that can be read."""
        for folder in self._complete()[:1]:
            with suppress(OSError, RuntimeError, pickle.UnpicklingError):
                return tuple(read_state(folder / own_file(read_manifest(folder / MANIFEST)), mapped=True)["members"])
        return None

    def save_model(self, name: str, state_dict: dict[str, Any]) -> None:
        """Write a mean model as `name`, "best.pt" or "last.pt". Called by rank 0 only."""
        self._make(self._folder)
        write_atomically(self._folder / name, partial(torch.save, state_dict))

    def keep_model(self, step: int, state_dict: dict[str, Any], keep: int) -> None:
        """Write the mean model of an evaluation as models/step_<step>.pt; only the `keep` newest stay. Rank 0 only."""
        folder = self._folder / MODELS
        self._make(folder)
        write_atomically(folder / f"step_{step:08d}.pt", partial(torch.save, state_dict))
        files = sorted(folder.glob("step_*.pt"))
        mine = files.index(folder / f"step_{step:08d}.pt")
        for file in [*files[: max(0, mine - (keep - 1))], *files[mine + 1 :]]:  # later ones will be written again
            file.unlink()

    def _make(self, folder: Path) -> None:
        """Make a folder below the run's, which is not made again if it was removed while the run trains."""
        self._folder.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)

    def _complete(self) -> list[Path]:
        """Folders with a manifest, newest first; the same list on all ranks."""
        folders = sorted((f.parent.name for f in self._folder.glob(f"{FOLDERS}/{MANIFEST}")), reverse=True)
        return [self._folder / name for name in gather_objects(folders)[0]]

    def _read(self, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint, after checking that this rank's file is as it was written."""
        manifest = read_manifest(folder / MANIFEST)
        if manifest.fingerprint not in self._own:
            raise CheckpointError(f"{folder} is foreign: it was written with another configuration")
        file = folder / own_file(manifest)
        try:
            found = describe(file)
        except OSError as error:
            kind = DamagedError if isinstance(error, FileNotFoundError) else CheckpointError
            raise kind(f"{file} cannot be read ({error.strerror})") from error
        if manifest.files.get(file.name) != found:
            raise DamagedError(f"{file} is damaged: size or sha256 are not those of {MANIFEST}")
        return manifest

    def _tidy(self) -> None:
        """Remove what killed processes have left unfinished; called while no rank writes."""
        left = [*self._folder.glob(".*.tmp"), *self._folder.glob(f"{MODELS}/.*.tmp")]
        for folder in self._folder.glob(FOLDERS):
            if files := files_of(folder):
                left += [file for file in folder.glob("rank_*.pt") if file.name not in files] + [*folder.glob(".*.tmp")]
            elif not (folder / MANIFEST).exists():
                remove(folder)
        for file in left:
            with suppress(OSError):  # NFS keeps files that some process has open
                file.unlink()

    def _prune(self, saved: int) -> None:
        """Remove complete checkpoints, except the one just saved and the `keep` - 1 newest before it.

        Later checkpoints, which could not be used when the run was resumed, stay.
        """
        steps = sorted(int(f.parent.name.removeprefix("step_")) for f in self._folder.glob(f"{FOLDERS}/{MANIFEST}"))
        earlier = [step for step in steps if step < saved]
        for step in earlier[: max(0, len(earlier) - (self._keep - 1))]:
            remove(self._folder / f"step_{step:08d}")
        self._tidy()


def remove(folder: Path) -> None:
    """Remove a checkpoint, as far as that is possible."""
    (folder / MANIFEST).unlink(missing_ok=True)  # first: without it the rest does not count
    shutil.rmtree(folder, ignore_errors=True)  # NFS keeps files that some process has open


def files_of(folder: Path) -> Collection[str]:
    """Return the names of a checkpoint's files; none if it is not complete, or of another format."""
    with suppress(CheckpointError):
        return read_manifest(folder / MANIFEST).files
    return ()


def own_file(manifest: Manifest) -> str:
    """Return the name of this rank's file."""
    again = file_name(rank(), AGAIN)
    return again if again in manifest.files else file_name(rank())


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises a CheckpointError that names the file if it is not one."""
    try:
        manifest = Manifest(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{file} is not a manifest ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.format}, expected {FORMAT}")
    return manifest


def file_name(process: int, suffix: str = "") -> str:
    """Return the name of one process's file."""
    return f"rank_{process}{suffix}.pt"


def read_state(file: Path, mapped: bool) -> dict[str, Any]:
    """Return what `torch.save` wrote, on the CPU; if `mapped`, large tensors are views of the file.

    State for a GPU is copied there from the mapped file. Optimizers keep tensors that they load: all of them on the CPU
    and step counters on a GPU. These must not refer to the file, or it would stay mapped for the whole run.
    """
    state = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    if not mapped:
        return state
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.numel() < SMALL else tensor, state)


def read_model(file: str | Path, key: str = "") -> dict[str, Tensor]:
    """Read a bare state dict, such as a run's checkpoints/best.pt.

    Raises a ConfigError of one line, which begins with `key` and the file, if it is not one.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler may fail in any way on a foreign file
        reason = "the file is damaged, or of another kind"
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # from torch, for a truncated file
            reason = error.strerror
        elif isinstance(error, RuntimeError):
            reason = one_line(error)[:SHOWN]
        raise ConfigError(f"{key}{file}: cannot be read as a model ({reason})") from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise ConfigError(f"{key}{file}: expected a bare state dict, such as checkpoints/best.pt of a run")
    return state


def fill_model(module: nn.Module, state: dict[str, Tensor], where: str, whose: str = "this model") -> None:
    """Give a model the weights of a state dict.

    Raises a ConfigError of one line, which begins with `where`, if they do not fit `whose` or are not finite.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"{where}: expected a state dict of {whose}: {one_line(error)[:SHOWN]}") from error
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(f"{where}: expected finite weights, but {name} holds others: the training diverged")
