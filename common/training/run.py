"""What a process needs to take part in a run."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.config.config import Config
from common.record.checkpoint import Checkpoints
from common.record.run_folder import RunFolder, checkpoints_of
from common.training.recorder import Recorder
from common.training.task import Task


class Timetable(NamedTuple):
    """Numbers of updates: in the whole run, in an epoch of its initial workers, between evaluations, and between
    checkpoints."""

    steps: int
    epoch: int
    evaluate_every: int
    save_every: int

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows this update."""
        return step % self.evaluate_every == 0 or step == self.steps

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint follows this update."""
        return step % self.save_every == 0 or step == self.steps


@dataclass(frozen=True)
class Run:
    """A run as one of its processes sees it; rank: of this process in the process group."""

    task: Task
    config: Config
    device: torch.device
    rank: int
    recorder: Recorder
    checkpoints: Checkpoints
    timetable: Timetable

    def tell(self, sentence: str) -> None:
        """Print a notice, on rank 0."""
        if self.rank == 0:
            print(sentence, file=sys.stderr, flush=True)


def new_run(task: Task, config: Config, device: torch.device, rank: int, folder: RunFolder | None) -> Run:
    """Return the run of this process, after counting the task's data."""
    recorder, steps = Recorder(config, task, folder), timetable(task, config, device)
    return Run(task, config, device, rank, recorder, checkpoints_of(config), steps)


def timetable(task: Task, config: Config, device: torch.device) -> Timetable:
    """Return the timetable of the run; an epoch is counted in global batches."""
    passes = config.training.gradient_accumulation
    local_batch = config.training.batch_size // (config.ranks * passes)
    steps_per_epoch = max(1, task.train_data(0, config.ranks, local_batch, device).steps_per_epoch // passes)
    steps = config.training.steps or max(1, round((config.training.epochs or 0) * steps_per_epoch))
    save_every = config.training.checkpoint_every or steps
    return Timetable(steps, steps_per_epoch, config.evaluation.every or steps_per_epoch, save_every)
