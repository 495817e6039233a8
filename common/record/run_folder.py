"""The folder of one run: config.yaml, environment.json, metrics.jsonl, summary.json, checkpoints/."""

import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.arguments import differences
from common.atomic import strict_json, write_atomically
from common.cli import one_line
from common.config.base import BOOKKEEPING, FORMER_BOOKKEEPING, is_bookkeeping
from common.config.config import Config, ConfigError
from common.config.overrides import flatten, typed
from common.parallel.collectives import gather_objects, rank
from common.record import read_status
from common.record.checkpoint import CheckpointError, Checkpoints
from common.record.environment import describe_environment, now
from common.record.run_lock import RunLock

GONE = "was removed or moved while the run trained in it, so the run ends"
RECORDS = ("config.yaml", "environment.json", "metrics.jsonl")
FIRST_BOOKKEEPING = re.compile(
    r"(run_dir|resume|logging\.|profile|training\.(threads|checkpoint)|elastic\.(min_workers|restarts|agent)).*"
)
EARLIER_BOOKKEEPING = (FIRST_BOOKKEEPING, FORMER_BOOKKEEPING)  # left out of the fingerprints in older checkpoints


class FinishedError(Exception):
    """The folder holds this run, finished, and `resume=true` was given: there is nothing to do."""


class RunFolder:
    """The records of a run. Only rank 0 makes this object and writes, and it holds the folder's lock until `close`.

    With `resume=true` the run in the folder is continued; without it, a folder that holds a run is refused. Rows are
    only added to metrics.jsonl, except that a resumed run removes the rows of steps that it repeats (`cut`). Numbers
    that are not finite are null in all files.

    start: given by a process that has `claimed` the folder for this one; None: the folder is checked here

    `sent` is the step of the last row that earlier starts wrote, `kept` of the last row that is left; 0 without one.

    Raises ConfigError as `check_folder` does, or if another process trains in the folder, and FinishedError;
    RuntimeError if the folder was claimed and is gone.
    """

    def __init__(self, config: Config, overrides: list[str], start: str | None = None) -> None:
        self.path = Path(config.run_dir)
        if start is not None and not self.path.exists():
            raise RuntimeError(f"run_dir={self.path}: {GONE}")
        self._lock = RunLock(self.path, start or uuid.uuid4().hex)
        self._new: list[str] = []
        self._lock.take()
        try:
            if start is None:
                check_folder(config)
            self._new = [name for name in RECORDS if not (self.path / name).exists()]
            self._open(config, overrides)
        except OSError as error:
            self._remove_new()
            self._lock.release()
            raise ConfigError(f"run_dir={self.path}: cannot be written ({error.strerror})") from error
        except Exception:
            self._lock.release()
            raise

    def _open(self, config: Config, overrides: list[str]) -> None:
        for left in self.path.glob(".*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        known = self.path / "environment.json"
        self._environment = describe_environment(config.task, overrides) | {"run_id": uuid.uuid4().hex[:12]}
        if (self.path / "config.yaml").exists() and known.exists():
            earlier = read_environment(known)
            this_start = {key: self._environment[key] for key in ("start", "git_commit")}
            resumed = [*earlier["resumed"], this_start]
            self._environment |= {"start": earlier["start"], "run_id": earlier["run_id"], "resumed": resumed}
        write_atomically(self.path / "config.yaml", to_yaml(config).encode())
        self._write_json("environment.json", self._environment)
        self._metrics = (self.path / "metrics.jsonl").open("ab")
        self.sent = self.kept = last_step(self.path / "metrics.jsonl")

    @property
    def run_id(self) -> str:
        """Name of this run, which stays the same when it is resumed."""
        return self._environment["run_id"]

    def record_hosts(self, hosts: Sequence[str]) -> None:
        """Record the hosts of the processes of this start; hosts: a name for each process."""
        names = list(dict.fromkeys(hosts))
        self._environment["hosts"] = names
        if self._environment.get("resumed"):
            self._environment["resumed"][-1]["hosts"] = names
        self._write_json("environment.json", self._environment)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row to metrics.jsonl.

        Raises RuntimeError if another process has taken the folder over, or if it was removed or moved.
        """
        self._check()
        self._metrics.write(strict_json(row).encode() + b"\n")
        self._metrics.flush()

    def metrics_bytes(self) -> int:
        """Return the length of metrics.jsonl, after it is safe on disk. Raises RuntimeError as `append` does."""
        self._check()
        os.fsync(self._metrics.fileno())
        return self._metrics.tell()

    def _check(self) -> None:
        file = self.path / "metrics.jsonl"
        if not (file.exists() and os.path.samestat(file.stat(), os.fstat(self._metrics.fileno()))):
            raise RuntimeError(f"run_dir={self.path}: {GONE}")
        self._lock.check()

    def cut(self, length: int) -> None:
        """Cut metrics.jsonl back to its length at the checkpoint, so that no step has two rows.

        Raises CheckpointError if it is shorter than that.
        """
        present = (self.path / "metrics.jsonl").stat().st_size
        if present < length:
            raise CheckpointError(
                f"{self.path / 'metrics.jsonl'} has {present} bytes, but the checkpoint was written after {length}: "
                "rows are missing"
            )
        self._metrics.truncate(length)
        self._metrics.seek(0, os.SEEK_END)
        self.kept = last_step(self.path / "metrics.jsonl")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, and the time at which this start ended."""
        self._metrics.flush()
        self._environment["end"] = now()
        self._write_json("environment.json", self._environment)
        self._write_json("summary.json", summary)

    def fail(self, error: Exception) -> None:
        """Write that the run failed, unless that cannot be written either."""
        self._environment["end"] = now()
        try:
            self._write_json("environment.json", self._environment)
            self._write_json("summary.json", {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        except RuntimeError:  # another process has taken the folder over
            pass
        except OSError as other:
            print(f"run_dir={self.path}: cannot record that the run failed ({other.strerror})", file=sys.stderr)

    def withdraw(self) -> None:
        """Remove what this start has made, if it has recorded nothing yet: it was refused."""
        if not self._metrics.tell() and not (self.path / "checkpoints").exists():
            self._remove_new()

    def close(self) -> None:
        """Close the files and release the folder to other processes."""
        with suppress(OSError):  # on a full disk, where a row is still to be written
            self._metrics.close()
        self._lock.release()

    def _remove_new(self) -> None:
        for name in self._new:
            (self.path / name).unlink(missing_ok=True)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._lock.check()
        write_atomically(self.path / name, (strict_json(content, indent=2) + "\n").encode())


@contextmanager
def claimed(config: Config) -> Iterator[str]:
    """Hold the folder for processes that this one will start; yield the `start` with which they make their RunFolder.

    Raises the same errors as RunFolder.
    """
    lock = RunLock(Path(config.run_dir), uuid.uuid4().hex)
    lock.take()
    try:
        check_folder(config)
        yield lock.start
    finally:
        lock.release()


def open_on_first(make: Callable[[], RunFolder]) -> RunFolder | None:
    """Let rank 0 make the run folder, and return it there. Collective: a refusal is raised on all ranks."""
    folder, refusal = None, None
    if rank() == 0:
        try:
            folder = make()
        except (ConfigError, FinishedError) as error:
            refusal = error
    everyones = gather_objects(None if refusal is None else type(refusal)(str(refusal)))
    if refusal or everyones[0]:
        raise refusal or everyones[0]
    return folder


def check_folder(config: Config) -> None:
    """Check that the run may train in its folder.

    Raises ConfigError if the folder holds another run, or this one and `resume=true` is missing; FinishedError if it
    holds this run, finished, and `resume=true` is given.
    """
    path = Path(config.run_dir)
    present = [name for name in ("config.yaml", "metrics.jsonl", "summary.json") if (path / name).exists()]
    if not present:
        return
    status = read_status(path)
    if not config.resume:
        what = "a finished run" if status == "finished" else "a run that is not finished (resume=true continues it)"
        raise ConfigError(f"run_dir={path}: holds {what}; expected an empty or new folder (name=... or run_dir=...)")
    if (path / "config.yaml").exists():
        changed = compare(path / "config.yaml", config)
        if changed:
            model = path / "checkpoints" / "last.pt"
            hint = f"\nWith another run_dir, {typed('init_from', str(model))} goes on from its mean model"
            raise ConfigError(
                f"run_dir={path}: holds a run with another configuration, expected the same to resume:\n  "
                + "\n  ".join(changed)
                + (hint if model.exists() else "")
            )
    if status == "finished":
        raise FinishedError(f"run_dir={path}: this run is finished already")


def read_environment(file: Path) -> dict[str, Any]:
    """Read what earlier starts of a run recorded. Raises ConfigError if it is something else."""
    try:
        earlier = json.loads(file.read_bytes())
        return {"start": earlier["start"], "run_id": earlier["run_id"], "resumed": [*earlier.get("resumed", [])]}
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: is damaged, expected what this run recorded of its start; without this file it can go on"
        ) from error


def last_step(file: Path) -> int:
    """Return the step of the last whole row of metrics.jsonl; 0 without one."""
    for line in reversed(file.read_bytes().splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def fingerprint(config: Config, bookkeeping: re.Pattern[str] = BOOKKEEPING) -> str:
    """Return a hash of the configuration's keys that change a result, which identifies the computation."""
    values = flatten(config.model_dump(mode="json"))
    fixed = {key: value for key, value in values.items() if not bookkeeping.fullmatch(key)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def checkpoints_of(config: Config) -> Checkpoints:
    """Return the checkpoints of a run; those of earlier versions are its own too."""
    folder, keep = Path(config.run_dir) / "checkpoints", config.training.checkpoints_kept
    earlier = [fingerprint(config, bookkeeping) for bookkeeping in EARLIER_BOOKKEEPING]
    return Checkpoints(folder, fingerprint(config), keep, also=earlier)


def to_yaml(config: Config) -> str:
    """Return the text of config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def compare(file: Path, config: Config) -> list[str]:
    """Return a line for each key that changes a result and in which a saved configuration differs from this one."""
    try:
        saved = flatten(OmegaConf.to_container(OmegaConf.load(file)))
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeError, RecursionError) as error:
        raise ConfigError(
            f"{file}: is damaged, expected the configuration of this run ({one_line(error)}); without this file it can "
            "go on, if the checkpoint is of the same configuration"
        ) from error
    wanted = flatten(config.model_dump(mode="json"))
    keys = [key for key in {**saved, **wanted} if not is_bookkeeping(key)]
    return differences(saved, wanted, keys, "(not set)", "now")
