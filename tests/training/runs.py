"""Small runs of the cnn task: processes that a test starts, signals and kills one by one, and what runs leave."""

import json
import multiprocessing
import os
import shutil
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.distributed.processes import PRELOAD
from tests.ports import free_port
from tests.waiting import LIMIT_S

RUN = [
    "model.width=4",
    "training.threads=1",
    "training.steps=24",
    "training.checkpoint_every=2",
    "schedule.warmup=3",
    "evaluation.every=5",
    "logging.every=3",
    "logging.noise_scale_every=1",
    "logging.progress=false",
    "resume=true",
]


class Ranks:
    """One start of a run: `n` processes with the environment that torchrun gives them, forked from a warm server.

    late_s: how much later than rank 0 the others begin
    """

    def __init__(self, arguments: list[str], n: int, log: Path, late_s: float = 0.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self.processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(arguments, rank, n, port, log, late_s), daemon=True)
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> bool:
        """Return whether all processes end within `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    def signal(self, number: int, ranks: range | None = None) -> None:
        """Send a signal to all processes, or to some."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid or 0, number)

    def codes(self) -> list[int | None]:
        """Return the exit codes."""
        return [process.exitcode for process in self.processes]


def _rank(arguments: list[str], rank: int, n: int, port: int, log: Path, late_s: float) -> None:
    if rank > 0:
        time.sleep(late_s)
    from common.launch.processes import launch

    descriptor = os.open(log.with_name(f"{log.name}.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if n > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    sys.exit(launch("cnn", arguments))


def finish(ranks: Ranks) -> None:
    assert ranks.wait(LIMIT_S), "the run hangs"
    assert set(ranks.codes()) == {0}


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path, times: bool = False) -> list[dict[str, Any]]:
    """Return metrics.jsonl, with wall-clock figures if `times` is set."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if times or not key.startswith("time_")} for row in lines]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything of the last checkpoint and the mean models, by name."""
    found: dict[str, torch.Tensor] = {}
    last = max((folder / "checkpoints").glob("step_*"))
    for file in [*sorted(last.glob("*.pt")), *sorted((folder / "checkpoints").glob("*.pt"))]:
        collect(torch.load(file, weights_only=True), file.name, found)
    return found


def collect(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not str(key).startswith(("times", "recent_times", "launch_to_merge_s", "exposed_s")):
                collect(item, f"{name}.{key}", found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            collect(item, f"{name}.{index}", found)
    elif isinstance(value, int | float) and "time_" not in name:
        found[name] = torch.tensor(value, dtype=torch.float64)


def assert_same_run(folder: Path, reference: Path) -> None:
    assert rows(folder) == rows(reference)
    ours, theirs = tensors(folder), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 50
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def forget(folder: Path, step: int) -> None:
    """Take away the checkpoint at that step and the summary, as if the run had been killed before them."""
    shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    (folder / "summary.json").unlink()


def manifests(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step_*/manifest.json"), reverse=True)
