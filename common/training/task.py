"""The interface of a task: model, data, loss and metrics for the loop."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from common.config.config import Config, ConfigError

Batch = Any  # whatever the task's data yields and its loss understands


class TrainData(Protocol):
    """One worker's training data.

    An epoch is one sequence of local batches, dealt to the workers in turn: worker i of n takes number i, n + i, ...
    """

    @property
    def batch_size(self) -> int:
        """Samples in a local batch, or whatever else the task counts."""

    @property
    def batches_per_epoch(self) -> int:
        """Local batches in an epoch, of all workers together."""

    @property
    def steps_per_epoch(self) -> int:
        """Local batches of each worker in an epoch; a remainder too small for all workers is left out."""

    def epoch(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Batch]:
        """Return this worker's batches of that epoch from number `start` on; a function of seed, worker and epoch.

        offset: batches at the beginning of the sequence that were dealt before, perhaps to other workers; the rest is
                dealt from the first worker on
        """


def dealt(batches: int, worker: int, workers: int, start: int = 0, offset: int = 0) -> range:
    """Return which of an epoch's batches a worker takes; arguments as in `TrainData.epoch`."""
    rounds = (batches - offset) // workers
    return range(offset + start * workers + worker, offset + rounds * workers, workers)


class Task(ABC):
    """A task, made once in each process from its checked configuration.

    The constructor raises ConfigError for data that are missing or do not fit.
    """

    config_class: ClassVar[type[Config]] = Config
    sums: ClassVar[tuple[str, ...]]  # names of the sums of `evaluate`
    primary_metric: ClassVar[str]  # key of the validation rows that decides which is best
    higher_is_better: ClassVar[bool]
    fixed_shapes: ClassVar[bool] = False  # whether all training batches have one shape
    late_imports: ClassVar[tuple[str, ...]] = ()  # modules it imports on use; done once before workers are forked

    @abstractmethod
    def __init__(self, config: Config) -> None: ...

    @classmethod
    def check_files(cls, config: Config) -> None:
        """Raise ConfigError if prepared data are missing on this machine; nothing is read or made.

        It is called by the process that starts the workers, before it starts them.
        """
        return

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the bare model on the CPU, with torch's global random numbers, which are seeded alike everywhere."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a sharded model that are gathered one after another; only their forward may be called.

        The rest is gathered as a whole. By default the layers of each list or sequence of layers.
        """
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList | nn.Sequential)]
        return [layer for layers in lists for layer in layers]

    @abstractmethod
    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> TrainData:
        """Return worker `worker`'s share, in local batches of `batch_size` samples on `device`."""

    def before_evaluation(self, step: int) -> None:
        """Prepare for the evaluation after this step, for tasks whose evaluation data depend on the step."""
        return

    @abstractmethod
    def evaluation_data(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterable[Batch]:
        """Return a shard of the validation set; the shards together hold every sample exactly once."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar training loss of a local batch, the mean over its samples."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over a batch's samples, a scalar for each name in `sums`, to be added over batches and ranks."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return validation metrics from the total sums, among them the primary metric and "loss"."""

    def samples(self, data: TrainData) -> float:
        """Return the average number of samples over which the loss of a local batch is a mean, for noise scales.

        Language models count tokens, whatever `data.batch_size` counts.
        """
        return data.batch_size

    def throughput(self, samples_per_s: float) -> dict[str, float]:
        """Return figures of speed for train rows, logged as time_<name>; samples of all workers together."""
        return {}


def load_task(name: str) -> type[Task]:
    """Return the class `TASK` of the module `<name>.task`, by which tasks plug in from outside.

    Raises ConfigError if there is none.
    """
    module = f"{name}.task"
    try:
        return importlib.import_module(module).TASK
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # another module, which the task needs
        raise ConfigError(f"task={name}: expected a package with a module `task` that defines TASK") from error
