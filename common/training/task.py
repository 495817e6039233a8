"""What a task supplies to the loop: model, data, loss and metrics."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from common.training.config import Config

Batch = Any  # whatever the task's data yields and its loss understands


class TrainData(Protocol):
    """One worker's training data. All workers have the same number of steps in an epoch."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of that epoch from number `start` on; the same for the same seed, worker and epoch."""


class Task(ABC):
    """A task, made once in each process from its checked configuration.

    Raises ConfigError in the constructor for data that is missing or does not fit.
    """

    config_class: ClassVar[type[Config]] = Config
    sums: ClassVar[tuple[str, ...]]  # names of what `evaluate` adds up
    primary_metric: ClassVar[str]  # of the validation rows, decides which is best
    higher_is_better: ClassVar[bool]
    late_imports: ClassVar[tuple[str, ...]] = ()  # modules it imports on use; done once before workers are forked

    @abstractmethod
    def __init__(self, config: Config) -> None: ...

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The bare model on the CPU; random numbers come from torch's global generator, seeded alike everywhere."""

    @abstractmethod
    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> TrainData:
        """Worker `worker`'s share, in local batches of `batch_size` samples on `device`."""

    @abstractmethod
    def evaluation_data(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterable[Batch]:
        """This shard of the validation set; the shards together hold every sample exactly once."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scalar training loss of a local batch, its mean over samples."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the samples of a batch, one scalar for each name in `sums`, to be added over batches and ranks."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Validation metrics from the total sums, among them the primary metric and "loss"."""

    def throughput(self, samples_per_s: float) -> dict[str, float]:
        """Figures of speed for train rows, logged as time_<name>; samples of all workers together."""
        return {}


def load_task(name: str) -> type[Task]:
    """The class `TASK` of module `<name>.task`; the convention by which tasks plug in from outside."""
    return importlib.import_module(f"{name}.task").TASK
