"""Evaluating, saving and resuming within one start of a run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.parallel.collectives import gather_objects
from common.training.checkpoint import Checkpoints
from common.training.config import Config
from common.training.evaluation import Evaluator
from common.training.recorder import Recorder
from common.training.run_folder import RunFolder
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


class Session:
    """The loop's evaluations and checkpoints. All methods are collective."""

    def __init__(self, setup: Setup, workers: Sequence[Worker]) -> None:
        self._setup, self._workers = setup, workers
        self._evaluator = Evaluator(setup.task, workers, setup.config, setup.device, setup.rank)

    def evaluate(self) -> None:
        """Evaluate the mean model, record it, and keep it as best.pt if it is the best so far."""
        setup = self._setup
        setup.task.before_evaluation(setup.recorder.clock)

        def record(metrics: dict[str, float], mean_model: torch.nn.Module) -> None:
            best, kept = setup.recorder.validation(metrics), setup.config.evaluation.models_kept
            if setup.rank == 0 and best:
                setup.checkpoints.save_model("best.pt", bare_state(mean_model))
            if setup.rank == 0 and kept:
                setup.checkpoints.keep_model(setup.recorder.clock, bare_state(mean_model), kept)
            if best or kept:
                gather_objects(None)  # messages of the next step would not wait as long for rank 0

        self._evaluator.evaluate(record)
        setup.recorder.begin_step()

    def save(self) -> None:
        """Save a checkpoint with all that a run continues from, and the mean model as last.pt."""
        setup, model = self._setup, self._workers[0].model
        with model.averaged() as mean_model:
            if setup.rank == 0:
                setup.checkpoints.save_model("last.pt", bare_state(mean_model))
        # The checkpoint comes last: a run killed before it repeats all of this, after it nothing is missing.
        metrics_bytes = setup.folder.metrics_bytes() if setup.folder is not None else 0
        setup.checkpoints.save(model.clock, self._state(), metrics_bytes)
        setup.recorder.begin_step()

    def resume(self, rehearse: Callable[[], list[Tensor]]) -> None:
        """Continue from the newest usable checkpoint, or begin anew if there is none.

        rehearse: runs one forward and backward pass. DDP fixes the order in which it adds gradients in its first
        backward, which an uninterrupted run has behind it. So a resumed run rehearses a step, whose traces the loaded
        state then covers.
        """
        setup = self._setup
        found = setup.checkpoints.load(setup.device, self._tell)
        if found is not None:
            manifest, state = found
            if self._workers[0].model.settles_in_first_backward:
                rehearse()
                for worker in self._workers:
                    worker.optimizer.zero_grad(set_to_none=True)
            self._load(state)
            self._tell(f"resumed at step {manifest.step}")
        if setup.folder is not None:
            setup.folder.cut(found[0].metrics_bytes if found is not None else 0)

    def _state(self) -> dict[str, Any]:
        return {
            "workers": [worker.state_dict() for worker in self._workers],
            "recorder": self._setup.recorder.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.load_state_dict(saved)
        self._setup.recorder.load_state_dict(state["recorder"])

    def _tell(self, sentence: str) -> None:
        if self._setup.rank == 0:
            print(sentence, file=sys.stderr, flush=True)


def bare_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of the bare module's state dict, whose tensors are views of larger ones."""
    module = getattr(module, "_orig_mod", module)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}
