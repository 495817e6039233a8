"""The training loop: the same for every task, every parallel method, real and simulated workers."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.parallel.regions import region
from common.training.config import Config
from common.training.interruption import Interruption
from common.training.numerics import autocast
from common.training.profiling import Trace
from common.training.recorder import Recorder
from common.training.session import Session, Setup
from common.training.task import Task
from common.training.worker import Worker, build_workers


def train(setup: Setup) -> str:
    """Train to the configured number of committed updates, evaluating, recording and saving on the way.

    Every process calls it with the same configuration. In one update all local workers first run forward and
    backward, then all step: a process has one worker, a simulation has all of them. Returns "finished", or
    "interrupted" if a signal asked to stop: then a checkpoint was saved.
    """
    task, config, device, recorder = setup.task, setup.config, setup.device, setup.recorder
    steps, steps_per_epoch = lengths(task, config, device)
    evaluate_every = config.evaluation.every or steps_per_epoch
    workers = build_workers(task, config, device, setup.rank, steps, steps_per_epoch)
    session = Session(setup, workers)
    session.resume(lambda: [backward(task, worker, config, device) for worker in workers])
    recorder.begin(workers, steps)
    with (
        step_named(recorder),
        Interruption(device, config.logging.every) as interruption,
        Trace(config.run_dir, setup.rank, config.profile) as trace,
    ):
        stop = False
        while recorder.clock < steps and not stop:
            before = recorder.clock
            losses = [backward(task, worker, config, device) for worker in workers]
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
            trace.step()
            if not committed:
                continue
            step = recorder.clock
            if step % evaluate_every == 0 or step == steps:
                session.evaluate()
            stop = interruption.requested(step)
            if stop or step == steps or step % (config.training.checkpoint_every or steps) == 0:
                session.save()
    status = "finished" if recorder.clock == steps else "interrupted"
    recorder.finish(status)
    for worker in workers:
        worker.model.close()
    return status


@contextlib.contextmanager
def step_named(recorder: Recorder) -> Iterator[None]:
    """Note on an error after which step it came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"after step {recorder.clock}")
        raise


def lengths(task: Task, config: Config, device: torch.device) -> tuple[int, int]:
    """Return the number of updates in the whole run and in an epoch, which is counted in global batches."""
    passes = config.training.gradient_accumulation
    local_batch = config.training.batch_size // (config.ranks * passes)
    steps_per_epoch = max(1, task.train_data(0, config.ranks, local_batch, device).steps_per_epoch // passes)
    steps = config.training.steps or max(1, round((config.training.epochs or 0) * steps_per_epoch))
    return steps, steps_per_epoch


def backward(task: Task, worker: Worker, config: Config, device: torch.device) -> Tensor:
    """Compute the (scaled) gradients of one update; return the mean loss over its micro-batches, detached."""
    passes = list(enumerate(worker.streams)) * config.training.gradient_accumulation
    if not worker.model.training:  # walking over all modules costs 0.1 ms
        worker.model.train()
    losses = []
    for index, (rank, stream) in enumerate(passes):
        synchronize = contextlib.nullcontext() if index == len(passes) - 1 else worker.model.no_sync()
        with stream.random.active(), worker.as_rank(rank), synchronize:
            with region("data"):
                batch = next(stream)
            with region("forward"), autocast(config.training.precision, device):
                loss = task.loss(worker.model, batch)
            with region("backward"):
                worker.scaler.scale(loss / len(passes) if len(passes) > 1 else loss).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def finish_gradients(worker: Worker, clip: float | None) -> Tensor | None:
    """Average gradients if the method does that, unscale and clip them; return their exact global norm if clipped."""
    worker.model.synchronize_gradients()
    if clip is None:
        return None
    worker.scaler.unscale_(worker.optimizer)
    return clip_grad_norm_(worker.model.parameters(), clip)
