"""Evaluating, saving and resuming within one start of a run."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config.config import Config, ConfigError
from common.config.elastic import Members
from common.parallel.collectives import gather_objects
from common.record.checkpoint import Checkpoint, Checkpoints
from common.record.run_folder import RunFolder
from common.training.evaluation import Evaluator
from common.training.recorder import Recorder
from common.training.sharding import bare_state
from common.training.task import Task
from common.training.worker import Worker


@dataclass(frozen=True)
class Setup:
    """What a process trains with. folder: None except on rank 0."""

    task: Task
    config: Config
    device: torch.device
    rank: int
    folder: RunFolder | None
    recorder: Recorder
    checkpoints: Checkpoints

    def tell(self, sentence: str) -> None:
        """Print a notice, on rank 0."""
        if self.rank == 0:
            print(sentence, file=sys.stderr, flush=True)


class Session:
    """The loop's evaluations and checkpoints. All methods are collective."""

    def __init__(self, setup: Setup, workers: Sequence[Worker], members: Members) -> None:
        self._setup, self._workers, self._members = setup, workers, members
        self._evaluator = Evaluator(setup.task, workers, setup.config, setup.device, setup.rank)

    def evaluate(self) -> None:
        """Evaluate the mean model, record it, and keep it as best.pt if it is the best so far."""
        setup = self._setup
        setup.task.before_evaluation(setup.recorder.clock)

        def record(metrics: dict[str, float], mean_model: torch.nn.Module) -> None:
            noise = setup.recorder.noise.after_evaluation(mean_model, setup.recorder.clock)
            best, kept = setup.recorder.validation(metrics | noise), setup.config.evaluation.models_kept
            if not (best or kept):
                return
            state = bare_state(mean_model, keep=setup.rank == 0)
            if setup.rank == 0 and best:
                setup.checkpoints.save_model("best.pt", state)
            if setup.rank == 0 and kept:
                setup.checkpoints.keep_model(setup.recorder.clock, state, kept)
            gather_objects(None)  # messages of the next step would not wait as long for rank 0

        self._evaluator.evaluate(record)
        setup.recorder.begin_step()

    def save(self) -> None:
        """Save a checkpoint with all that a run continues from, and the mean model as last.pt."""
        setup, model = self._setup, self._workers[0].model
        metrics_bytes = setup.folder.metrics_bytes() if setup.folder is not None else 0
        with model.averaged() as mean_model:
            state = bare_state(mean_model, keep=setup.rank == 0)
            if setup.rank == 0:
                setup.checkpoints.save_model("last.pt", state)
        # The checkpoint comes last: a run killed before it repeats all of this, after it nothing is missing.
        setup.checkpoints.save(model.clock, self._state(), metrics_bytes)
        setup.recorder.begin_step()

    def resume(self, found: Checkpoint | None, rehearse: Callable[[], list[Tensor]]) -> None:
        """Continue from a checkpoint, or begin anew if there is none.

        rehearse: runs one forward and backward pass. DDP fixes the order in which it adds gradients in its first
        backward, which an uninterrupted run has behind it. So a resumed run rehearses a step, whose traces the loaded
        state then covers.
        """
        setup = self._setup
        if found is not None:
            manifest, state = found
            then, now = state.get("device", setup.device.type), setup.device.type  # older checkpoints have none
            if then != now:
                raise ConfigError(
                    f"training.device={setup.config.training.device}: computes on {now}, but the checkpoint at step "
                    f"{manifest.step} is of {then}, whose results differ; expected the same to resume"
                )
            if self._workers[0].model.settles_in_first_backward:
                rehearse()
                for worker in self._workers:
                    worker.optimizer.zero_grad(set_to_none=True)
            self.load(state["workers"])
            setup.recorder.load_state_dict(state["recorder"])
            setup.tell(f"resumed at step {manifest.step}")
        if setup.folder is not None:
            setup.folder.cut(found[0].metrics_bytes if found is not None else 0)

    def _state(self) -> dict[str, Any]:
        return {
            "members": list(self._members),
            "device": self._setup.device.type,
            "workers": [worker.state_dict() for worker in self._workers],
            "recorder": self._setup.recorder.state_dict(),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with these states of the workers. Collective."""
        for worker, saved in zip(self._workers, states, strict=True):
            worker.load_state_dict(saved)
