"""The training loop: the same for every task, every parallel method, real and simulated workers."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.config import Config
from common.config.elastic import Members
from common.parallel.collectives import gather_objects
from common.parallel.counters import region
from common.training.gradients import backward_of, finish_gradients
from common.training.interruption import Interruption, Request
from common.training.members import config_of, follow, hand_over
from common.training.profiling import Trace
from common.training.recorder import Recorder
from common.training.session import Session, Setup
from common.training.stream import BEGINNING, Dealing
from common.training.task import Task
from common.training.worker import Worker, build_workers, is_out_of_memory


class Length(NamedTuple):
    """Numbers of updates: in the whole run, in an epoch of its first workers, from one evaluation or checkpoint to the
    next."""

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


class Stage(NamedTuple):
    """The part of a run in which the same members train.

    setup:    the run's, with the configuration of these members
    backward: computes the gradients of all local workers and returns their losses
    """

    setup: Setup
    members: Members
    workers: list[Worker]
    session: Session
    backward: Callable[[], list[Tensor]]


def train(setup: Setup) -> str:
    """Train to the configured number of committed updates, evaluating, recording and saving on the way.

    Every process calls it with the same configuration. In one update all local workers first run forward and
    backward, then all step: a process has one worker, a simulation has all of them. Returns "finished", or
    "interrupted" if a signal asked to stop: then a checkpoint was saved.
    """
    config, device, recorder = setup.config, setup.device, setup.recorder
    length = lengths(setup.task, config, device)
    found = setup.checkpoints.load(device, setup.tell)
    members = tuple(found.state["members"]) if found else tuple(range(config.n))
    stage = begin_stage(setup, members, length, anew=found is None)
    stage.session.resume(found, stage.backward)
    if found is None and config.init_from is not None:
        setup.tell(f"began with the model {config.init_from}; optimizer, schedule and data begin anew")
    recorder.begin(stage.workers, length.steps, stage.setup.config)
    with (
        step_named(recorder),
        Interruption(device, config.logging.every, group=stage.workers[0].model.everyone) as interruption,
        Trace(config.run_dir, setup.rank, config.profile) as trace,
    ):
        while True:
            members = config.elastic.members(config.n, recorder.clock)
            if members != stage.members:
                stage = change_members(setup, stage, members, length)
            if train_stage(stage, length, interruption, trace):
                break
    status = "finished" if recorder.clock == length.steps else "interrupted"
    recorder.finish(status)
    if setup.folder is not None:
        setup.folder.close()
    gather_objects(None)  # launchers end the others, rank 0 too, when the first one ends
    for worker in stage.workers:
        worker.model.close()
    return status


def begin_stage(
    setup: Setup, members: Members, length: Length, dealing: Dealing = BEGINNING, anew: bool = False
) -> Stage:
    """Build the local workers of these members.

    dealing: where their data begin
    anew:    the run begins, with the model `init_from` if there is one; else the workers will be given a state
    """
    config = config_of(setup.config, members)
    staged = replace(setup, config=config if anew else config.model_copy(update={"init_from": None}))
    numbers = None if members == tuple(range(setup.config.n)) else members
    workers = build_workers(
        setup.task, staged.config, setup.device, setup.rank, length.steps, length.epoch, dealing, numbers
    )
    backward = backward_of(setup.task, workers, staged.config, setup.device)
    return Stage(staged, members, workers, Session(staged, workers, members), backward)


def change_members(setup: Setup, stage: Stage, after: Members, length: Length) -> Stage:
    """Let other members go on, see `common.training.members`."""
    dealing = stage.workers[0].streams[0].rest()
    states = hand_over(stage.workers, stage.members, after, dealing)
    following = begin_stage(setup, after, length, dealing)
    setup.recorder.change(stage.members, after, following.setup.config.topology.name)
    for worker in stage.workers:
        worker.model.close()
    following.session.load(states)
    for worker in following.workers:
        follow(worker, following.setup.config, worker.model.clock)
    setup.recorder.begin(following.workers, length.steps, following.setup.config)
    return following


def train_stage(stage: Stage, length: Length, interruption: Interruption, trace: Trace) -> bool:
    """Train until the run is over or asked to stop; return False where other members have to go on before that.

    Raises PeerError when a peer is gone; all updates that were begun are finished then.
    """
    setup, workers, session = stage.setup, stage.workers, stage.session
    config, recorder = setup.config, setup.recorder
    changes = {change.step for change in config.elastic.script}
    request = Request.NOTHING
    while recorder.clock < length.steps and request is Request.NOTHING:
        before = recorder.clock
        with recorder.noise.of_update(before + 1):
            losses = stage.backward()
        norms = [finish_gradients(worker, config.training.clip) for worker in workers]
        with region("optimizer"):
            for worker in workers:
                worker.scaler.step(worker.optimizer)
                worker.scaler.update()
        committed = recorder.clock > before  # alike on all ranks; false if a scaler skipped the step
        recorder.step(committed, losses, norms)
        for worker in workers:
            worker.optimizer.zero_grad(set_to_none=True)
            if committed:
                worker.schedule.step()
            worker.model.check_peers()
        trace.step()
        if not committed:
            continue
        step = recorder.clock
        if length.evaluates(step):
            session.evaluate()
        request = interruption.requested(step)
        if request is Request.STOP or length.saves(step):
            session.save()
        if step in changes and step < length.steps and request is Request.NOTHING:
            return False
    return request is not Request.CHANGE or recorder.clock == length.steps


@contextlib.contextmanager
def step_named(recorder: Recorder) -> Iterator[None]:
    """Note on an error after which step it came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"after step {recorder.clock}")
        if is_out_of_memory(error):
            error.add_note("out of memory: expected a smaller model or training.batch_size, or fewer workers here")
        raise


def lengths(task: Task, config: Config, device: torch.device) -> Length:
    """Return the number of updates in the whole run, in an epoch, which is counted in global batches, and so on."""
    passes = config.training.gradient_accumulation
    local_batch = config.training.batch_size // (config.ranks * passes)
    steps_per_epoch = max(1, task.train_data(0, config.ranks, local_batch, device).steps_per_epoch // passes)
    steps = config.training.steps or max(1, round((config.training.epochs or 0) * steps_per_epoch))
    save_every = config.training.checkpoint_every or steps
    return Length(steps, steps_per_epoch, config.evaluation.every or steps_per_epoch, save_every)
