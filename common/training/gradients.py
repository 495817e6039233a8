"""The gradients of an update: of one worker after another, or of all simulated workers as one batch."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common.config.config import Config
from common.dtensors import whole
from common.parallel.collectives import explained_if_lost
from common.parallel.counters import region
from common.simulate import BatchedWorkers
from common.training.device import autocast
from common.training.task import Task
from common.training.worker import Worker


def backward_of(
    task: Task, workers: Sequence[Worker], config: Config, device: torch.device
) -> Callable[[], list[Tensor]]:
    """Return a function that computes the gradients of an update of these workers and returns their losses."""
    if config.workers.batched:
        batched = BatchedWorkers([worker.model for worker in workers], task.loss)
        return partial(backward_together, batched, workers, config, device)
    return lambda: [backward(task, worker, config, device) for worker in workers]


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
            with region("backward"), explained_if_lost("averaging gradients"):
                worker.scaler.scale(loss / len(passes) if len(passes) > 1 else loss).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def backward_together(
    batched: BatchedWorkers, workers: Sequence[Worker], config: Config, device: torch.device
) -> list[Tensor]:
    """Do what `backward` does, on the same data, for all simulated workers at once.

    Random draws inside the models, such as dropout, come from the first worker's random numbers.
    """
    losses = []
    for _ in range(config.training.gradient_accumulation):
        batches = []
        with region("data"):
            for worker in workers:
                (stream,) = worker.streams
                with stream.random.active():
                    batches.append(next(stream))
        with workers[0].streams[0].random.active():
            with region("forward"), autocast(config.training.precision, device):
                loss = batched.forward(batches)
            with region("backward"):
                batched.backward(loss.sum() / config.training.gradient_accumulation)
        losses.append(loss.detach())
    return list(torch.stack(losses).mean(0))


def finish_gradients(worker: Worker, clip: float | None) -> Tensor | None:
    """Average gradients if the method does that, unscale and clip them; return their exact global norm if clipped."""
    worker.model.synchronize_gradients()
    if clip is None:
        return None
    worker.scaler.unscale_(worker.optimizer)
    return whole(clip_grad_norm_(worker.model.parameters(), clip))
