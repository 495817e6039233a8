"""The folder of one run: config.yaml, environment.json, metrics.jsonl, summary.json, checkpoints/."""

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.training.checkpoint import CheckpointError, write_atomically
from common.training.compose import flatten
from common.training.config import Config, ConfigError
from common.training.environment import describe_environment, now
from common.training.overrides import typed

# Keys that do not change what is computed: a run may be resumed with other values of them.
FREE_KEYS = ("run_dir", "resume", "logging.", "profile", "training.threads", "training.checkpoint")
FREE_KEYS += ("elastic.min_workers", "elastic.restarts", "elastic.agent")


class RunFolder:
    """The records of a run. Only rank 0 makes this object and writes.

    With `resume=true` the run in the folder is continued; without it, a folder that holds a run is refused. Rows are
    only added to metrics.jsonl, except that a resumed run removes those that it will compute again (`cut`).
    """

    def __init__(self, config: Config, overrides: list[str]) -> None:
        self.path = Path(config.run_dir)
        self._make()
        known = self.path / "environment.json"
        self._environment = describe_environment(config.task, overrides) | {"run_id": uuid.uuid4().hex[:12]}
        if (self.path / "config.yaml").exists() and known.exists():
            earlier = json.loads(known.read_text())
            this_start = {key: self._environment[key] for key in ("start", "git_commit")}
            resumed = [*earlier.get("resumed", []), this_start]
            self._environment |= {"start": earlier["start"], "run_id": earlier["run_id"], "resumed": resumed}
        write_atomically(self.path / "config.yaml", to_yaml(config).encode())
        self._write_json("environment.json", self._environment)
        self._metrics = (self.path / "metrics.jsonl").open("ab")

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
        """Add a row to metrics.jsonl."""
        self._metrics.write(json.dumps(row).encode() + b"\n")
        self._metrics.flush()

    def metrics_bytes(self) -> int:
        """Return the length of metrics.jsonl, after it is safe on disk."""
        os.fsync(self._metrics.fileno())
        return self._metrics.tell()

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

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, and the time at which this start ended."""
        self._metrics.flush()
        self._environment["end"] = now()
        self._write_json("environment.json", self._environment)
        self._write_json("summary.json", summary)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={self.path}: cannot be made ({error.strerror})") from error
        if not os.access(self.path, os.W_OK):
            raise ConfigError(f"run_dir={self.path}: not writable")

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, (json.dumps(content, indent=2) + "\n").encode())


def is_finished(config: Config) -> bool:
    """Return whether `resume=true` was given for a folder that holds this run, finished.

    Every process may ask, before anything is written. Raises ConfigError if the folder holds another run, or this one
    and `resume=true` is missing.
    """
    path = Path(config.run_dir)
    present = [name for name in ("config.yaml", "metrics.jsonl", "summary.json") if (path / name).exists()]
    if not present:
        return False
    status = read_status(path)
    if not config.resume:
        what = "a finished run" if status == "finished" else "a run that is not finished (resume=true continues it)"
        raise ConfigError(f"run_dir={path}: holds {what}; expected an empty or new folder (name=... or run_dir=...)")
    if (path / "config.yaml").exists():
        differences = compare(path / "config.yaml", config)
        if differences:
            raise ConfigError(
                f"run_dir={path}: holds a run with another configuration, expected the same to resume:\n  "
                + "\n  ".join(differences)
                + f"\nWith another run_dir, {typed('init_from', f'{path}/checkpoints/last.pt')} goes on from its mean "
                "model"
            )
    return status == "finished"


def read_status(path: Path) -> str | None:
    """Return the status in summary.json, None without one."""
    try:
        return json.loads((path / "summary.json").read_text()).get("status")
    except (OSError, ValueError):
        return None


def fingerprint(config: Config) -> str:
    """Return a hash of the configuration without FREE_KEYS, which identifies the computation."""
    values = flatten(config.model_dump(mode="json"))
    fixed = {key: value for key, value in values.items() if not key.startswith(FREE_KEYS)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def to_yaml(config: Config) -> str:
    """Return the text of config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def compare(file: Path, config: Config) -> list[str]:
    """Return a line for each key in which a saved configuration differs from this one, without FREE_KEYS."""
    saved = flatten(OmegaConf.to_container(OmegaConf.load(file)))
    wanted = flatten(config.model_dump(mode="json"))
    keys = [key for key in {**saved, **wanted} if not key.startswith(FREE_KEYS)]
    missing = "(not set)"
    return [
        f"{key}: {saved.get(key, missing)} there, {wanted.get(key, missing)} now"
        for key in keys
        if saved.get(key, missing) != wanted.get(key, missing)
    ]
