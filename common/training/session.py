"""What one start of a run holds together: its records, its checkpoints, and how to go on from them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.parallel import GradScaler
from common.training.checkpoint import Checkpoints
from common.training.config import Config
from common.training.evaluation import Evaluator
from common.training.recorder import Recorder
from common.training.run_folder import RunFolder
from common.training.task import Task
from common.training.worker import Worker


@dataclass(frozen=True)
class Run:
    """One process's part of a run. folder: None but on rank 0."""

    task: Task
    config: Config
    device: torch.device
    rank: int
    folder: RunFolder | None
    recorder: Recorder
    checkpoints: Checkpoints


class Session:
    """Evaluates, saves and resumes for the loop. All methods are collective."""

    def __init__(self, run: Run, workers: Sequence[Worker], scaler: GradScaler) -> None:
        self._run, self._workers, self._scaler = run, workers, scaler
        self._evaluator = Evaluator(run.task, workers, run.config, run.device, run.rank)

    def evaluate(self) -> None:
        """Evaluate the mean model, record it, and keep it as best.pt if it is the best so far."""
        run = self._run

        def record(metrics: dict[str, float], mean_model: torch.nn.Module) -> None:
            best, kept = run.recorder.validation(metrics), run.config.evaluation.models_kept
            if run.rank == 0 and best:
                run.checkpoints.save_model("best.pt", bare_state(mean_model))
            if run.rank == 0 and kept:
                run.checkpoints.keep_model(run.recorder.clock, bare_state(mean_model), kept)

        self._evaluator.evaluate(record)

    def save(self) -> None:
        """Save all that is needed to go on from here bit for bit, and the mean model as last.pt."""
        run, model = self._run, self._workers[0].model
        with model.averaged() as mean_model:
            if run.rank == 0:
                run.checkpoints.save_model("last.pt", bare_state(mean_model))
        # The checkpoint comes last: a run killed before it does all of this again, after it nothing is missing.
        metrics_bytes = run.folder.metrics_bytes() if run.folder is not None else 0
        run.checkpoints.save(model.clock, self._state(), metrics_bytes)

    def resume(self, rehearse: Callable[[], list[Tensor]]) -> None:
        """Go on from the newest usable checkpoint, or begin anew if there is none.

        rehearse: runs one forward and backward. DDP decides in its first backward in which order gradients are
        added up from then on; an uninterrupted run has decided that long ago. So a resumed one first rehearses a step,
        and forgets it.
        """
        run = self._run
        found = run.checkpoints.load(run.device, self._tell)
        if found is not None:
            manifest, state = found
            if self._workers[0].model.settles_in_first_backward:
                self._load(state)
                rehearse()
                for worker in self._workers:
                    worker.optimizer.zero_grad(set_to_none=True)
            self._load(state)
            self._tell(f"resumed at step {manifest.step}")
        if run.folder is not None:
            run.folder.cut(found[0].metrics_bytes if found is not None else 0)

    def _state(self) -> dict[str, Any]:
        return {
            "workers": [worker.state_dict() for worker in self._workers],
            "scaler": self._scaler.state_dict(),
            "recorder": self._run.recorder.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        for worker, saved in zip(self._workers, state["workers"], strict=True):
            worker.load_state_dict(saved)
        self._scaler.load_state_dict(state["scaler"])
        self._run.recorder.load_state_dict(state["recorder"])

    def _tell(self, sentence: str) -> None:
        if self._run.rank == 0:
            print(sentence, file=sys.stderr, flush=True)


def bare_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The module's own state dict, copied: its tensors are views of larger ones."""
    module = getattr(module, "_orig_mod", module)
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
