"""The workers of a process: built, evaluated, saved and resumed together; simulated ones leave and join by script."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.config.config import Config, ConfigError
from common.config.elastic import Workers
from common.parallel.collectives import gather_objects
from common.record.checkpoint import Checkpoint
from common.training.evaluation import Evaluator
from common.training.gradients import backward_of
from common.training.members import config_of, copied, donor_of, follow, kept
from common.training.run import Run
from common.training.sharding import bare_state
from common.training.stream import BEGINNING, Dealing
from common.training.worker import build_workers


class WorkerGroup:
    """The local workers for as long as the same workers train: in a plain run, from its start to its end.

    members:  numbers of all workers that train, in all processes
    config:   of these members; `run.config` if no worker is missing
    backward: computes the gradients of an update of all local workers and returns their losses

    All methods are collective.
    """

    def __init__(self, run: Run, members: Workers, dealing: Dealing = BEGINNING, anew: bool = False) -> None:
        """Build the workers.

        dealing: where their data begin
        anew:    whether the run begins, with the model `init_from` if there is one; if not, the workers get a state
        """
        config = config_of(run.config, members)
        self.run, self.members = run, members
        self.config = config if anew else config.model_copy(update={"init_from": None})
        steps, numbers = run.timetable, None if members == tuple(range(run.config.n)) else members
        try:
            self.workers = build_workers(
                run.task, self.config, run.device, run.rank, steps.steps, steps.epoch, dealing, numbers
            )
        except ValueError as error:  # of an optimizer, a schedule or a method: an argument that comes from a key
            if dealing != BEGINNING:  # the run has trained
                raise
            raise ConfigError(str(error)) from error
        self.backward = backward_of(run.task, self.workers, self.config, run.device)
        self._evaluator = Evaluator(run.task, self.workers, self.config, run.device, run.rank)

    def evaluate(self) -> None:
        """Evaluate the mean model, record it, and keep it as best.pt if it is the best so far."""
        run = self.run
        run.task.before_evaluation(run.recorder.clock)

        def record(metrics: dict[str, float], mean_model: torch.nn.Module) -> None:
            noise = run.recorder.noise.after_evaluation(mean_model, run.recorder.clock)
            self.workers[0].model.check_peers()  # a mean from torn messages is not a result
            best, kept = run.recorder.validation(metrics | noise), run.config.evaluation.models_kept
            if not (best or kept):
                return
            state = bare_state(mean_model, keep=run.rank == 0)
            if run.rank == 0 and best:
                run.checkpoints.save_model("best.pt", state)
            if run.rank == 0 and kept:
                run.checkpoints.keep_model(run.recorder.clock, state, kept)
            gather_objects(None)  # messages of the next step would not wait as long for rank 0

        self._evaluator.evaluate(record)
        run.recorder.begin_step()

    def save(self) -> None:
        """Save a checkpoint with everything that a run needs to continue, and the mean model as last.pt."""
        run, folder, model = self.run, self.run.recorder.folder, self.workers[0].model
        metrics_bytes = folder.metrics_bytes() if folder is not None else 0
        with model.averaged() as mean_model:
            state = bare_state(mean_model, keep=run.rank == 0)
            if run.rank == 0:
                run.checkpoints.save_model("last.pt", state)
        # The checkpoint comes last: a run killed before it repeats all of this; after it, nothing is missing.
        run.checkpoints.save(model.clock, self._state(), metrics_bytes)
        run.recorder.begin_step()

    def resume(self, found: Checkpoint | None) -> None:
        """Continue from a checkpoint, or begin anew if there is none.

        DDP fixes the order in which it adds gradients in its first backward, which an uninterrupted run is past. So a
        resumed run first does a forward and backward pass, whose effects are overwritten when the state is loaded.
        """
        run = self.run
        if found is not None:
            manifest, state = found
            then, now = state.get("device", run.device.type), run.device.type  # older checkpoints have none
            if then != now:
                raise ConfigError(
                    f"training.device={run.config.training.device}: computes on {now}, but the checkpoint at step "
                    f"{manifest.step} is of {then}, whose results differ; expected the same to resume"
                )
            if self.workers[0].model.settles_in_first_backward:
                self.backward()
                for worker in self.workers:
                    worker.optimizer.zero_grad(set_to_none=True)
            self.load(state["workers"])
            run.recorder.load_state_dict(state["recorder"])
            run.tell(f"resumed at step {manifest.step}")
        if run.recorder.folder is not None:
            run.recorder.folder.cut(found[0].metrics_bytes if found is not None else 0)

    def _state(self) -> dict[str, Any]:
        return {
            "members": list(self.members),
            "device": self.run.device.type,
            "workers": [worker.state_dict() for worker in self.workers],
            "recorder": self.run.recorder.state_dict(),
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with these states of the workers."""
        for worker, saved in zip(self.workers, states, strict=True):
            worker.load_state_dict(saved)

    def close(self) -> None:
        """Close the workers' models."""
        for worker in self.workers:
            worker.model.close()


def begin(run: Run) -> WorkerGroup:
    """Build the workers of a run and begin it, or continue from its newest checkpoint. Collective."""
    found = run.checkpoints.load(run.device, run.tell)
    members = Workers(tuple(found.state["members"])) if found else run.config.all_workers
    group = WorkerGroup(run, members, anew=found is None)
    group.resume(found)
    if found is None and run.config.init_from is not None:
        run.tell(f"started from the model {run.config.init_from}; optimizer, schedule and data start afresh")
    run.recorder.begin(group.workers, run.timetable.steps, group.config)
    return group


def next_change(config: Config, clock: int) -> int | None:
    """Return the update after which `elastic.script` changes the members next; None if they stay."""
    return next((change.step for change in config.elastic.script if change.step > clock), None)


def with_scripted_members(group: WorkerGroup) -> WorkerGroup:
    """Return the group of the simulated workers that train now: the same one, or after a change a new one."""
    run, before = group.run, group.members
    after = run.config.elastic.members(run.config.n, run.recorder.clock)
    if after == before:
        return group
    dealing = group.workers[0].streams[0].rest()
    states = states_after(group, after, dealing)
    following = WorkerGroup(run, after, dealing)
    run.recorder.change(before, after, following.config.topology.name)
    group.close()
    following.load(states)
    for worker in following.workers:
        follow(worker, following.config, worker.model.clock)
    run.recorder.begin(following.workers, run.timetable.steps, following.config)
    return following


def states_after(group: WorkerGroup, after: Workers, dealing: Dealing) -> list[Mapping[str, Any]]:
    """Return the state with which each worker begins after the change; dealing: where the data continue."""
    states = {number: worker.state_dict() for number, worker in zip(group.members, group.workers, strict=True)}
    return [
        kept(states[number], states[number]["clock"], dealing)
        if number in states
        else copied(states[donor_of(number, group.members)])
        for number in after
    ]
