"""Evaluation of the mean model of all workers, and on request of each worker's own."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from common.config.config import Config
from common.parallel.averaging import restored
from common.parallel.collectives import mean_over_ranks_, sum_over_ranks, world_size
from common.torch_internals import AnyBatchNorm
from common.training.device import autocast
from common.training.stream import RandomState
from common.training.task import Batch, Task, TrainData
from common.training.worker import Worker

RECALIBRATION_SEED = 0  # of the augmentations; the same batches in every evaluation


class Evaluator:
    """Evaluation over all processes and their workers. Every validation sample counts once."""

    def __init__(self, task: Task, workers: Sequence[Worker], config: Config, device: torch.device, rank: int) -> None:
        self._task, self._workers, self._config = task, workers, config
        self._device, self._rank = device, rank
        self._recalibration: list[TrainData] = []

    def evaluate(self, then: Callable[[dict[str, float], nn.Module], None]) -> None:
        """Compute validation metrics of the mean model and the consensus distance, equal on all ranks. Collective.

        then: called with the metrics and the module, while it still holds the mean model

        With `evaluation.local_models` the metrics include a second set, `local_*`: each rank's own model with its own
        BatchNorm statistics on its own shard of the validation set, added up (the protocol of arXiv 2410.11998's
        ImageNet code). With `evaluation.keep_average` the mean model finally replaces every worker's.
        """
        options, model = self._config.evaluation, self._workers[0].model
        metrics = {"consensus_distance": model.consensus_distance()}
        if options.local_models:
            sums = self._sums(self._local_models())
            metrics |= {f"local_{name}": value for name, value in self._metrics(sums).items()}
        with model.averaged() as mean_model, self._recalibrated(mean_model):
            metrics |= self._metrics(self._mean_sums(mean_model))
            then(metrics, mean_model)
        if options.keep_average:
            model.average_()
            for worker in self._workers:
                worker.share_buffers()

    def _mean_sums(self, mean_model: nn.Module) -> Tensor:
        if not self._config.sharded:
            return self._sums([(mean_model, self._batches(self._rank, world_size()))])
        # Ranks of a worker gather parameters together, so all of them run the same batches, which are counted once.
        batches = self._batches(self._workers[0].index, self._config.n)
        return self._sums([(mean_model, batches)], counted=self._rank % self._config.ranks_per_worker == 0)

    def _local_models(self) -> Iterator[tuple[nn.Module, Iterable[Batch]]]:
        """Yield every local rank's own model and its shard."""
        for worker in self._workers:
            for rank, stream in enumerate(worker.streams):
                with worker.as_rank(rank):
                    yield worker.model.module, self._batches(stream.rank, self._config.ranks)

    def _batches(self, shard: int, shards: int) -> Iterable[Batch]:
        return self._task.evaluation_data(shard, shards, self._config.evaluation.batch_size, self._device)

    @torch.no_grad()
    def _sums(self, models: Iterable[tuple[nn.Module, Iterable[Batch]]], counted: bool = True) -> Tensor:
        """Return the sums of `task.evaluate` over all batches of these models and over the ranks that are `counted`."""
        sums = torch.zeros(len(self._task.sums), dtype=torch.float64, device=self._device)
        for model, batches in models:
            model.eval()
            for batch in batches:
                with self._autocast():
                    values = self._task.evaluate(model, batch)
                sums += torch.stack([values[name].double() for name in self._task.sums])
            model.train()
        return sum_over_ranks(sums if counted else torch.zeros_like(sums))

    def _metrics(self, sums: Tensor) -> dict[str, float]:
        return self._task.metrics(dict(zip(self._task.sums, sums.tolist(), strict=True)))

    @contextlib.contextmanager
    def _recalibrated(self, model: nn.Module) -> Iterator[None]:
        """Give the model the BatchNorm statistics of `evaluation.recalibrate_batches` training batches of every rank.

        The mean of the workers' statistics belongs to their models, not to the mean model.
        """
        norms = [part for part in model.modules() if isinstance(part, AnyBatchNorm) and part.track_running_stats]
        batches = self._config.evaluation.recalibrate_batches
        if not norms or not batches:
            yield
            return
        with restored(model, [buffer for norm in norms for buffer in norm.buffers()]), torch.no_grad():
            momenta = [norm.momentum for norm in norms]
            model.eval()
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches
                norm.train()
            for stream, data in zip(self._streams(), self._recalibration_data(), strict=True):
                random = RandomState(RECALIBRATION_SEED + stream, self._device)
                with random.active():
                    for _, batch in zip(range(batches), data.epoch(0), strict=False):
                        with self._autocast():
                            self._task.loss(model, batch)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var)]
            mean_over_ranks_(statistics, world_size())
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass, the same as in training."""
        return autocast(self._config.training.precision, self._device)

    def _streams(self) -> list[int]:
        """Return the ranks, real or simulated, for which this process draws batches."""
        return [stream.rank for worker in self._workers for stream in worker.streams]

    def _recalibration_data(self) -> list[TrainData]:
        """Return training data separate from the run's own, whose position must not change."""
        if not self._recalibration:
            ranks = self._config.ranks
            batch = self._config.training.batch_size // (ranks * self._config.training.gradient_accumulation)
            self._recalibration = [self._task.train_data(rank, ranks, batch, self._device) for rank in self._streams()]
        return self._recalibration
