"""One worker's training state. A process has one; a simulation has them all."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.cli import one_line
from common.config.config import Config, ConfigError
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel, GradScaler
from common.record.checkpoint import fill_model, read_model
from common.simulate import simulate
from common.training.optimization import build_optimizer, build_schedule
from common.training.sharding import module_state, optimizer_state, shard, without_shards
from common.training.stream import BEGINNING, Dealing, Stream
from common.training.task import Task


class RankBuffers:
    """The buffers of each rank of a simulated worker.

    All ranks of a worker share their parameters, but each has BatchNorm statistics of its own batches. A simulated
    worker has one module for all of them, so the buffers are swapped when a rank takes its turn. Between turns the
    module holds the mean over the ranks, so that a mean over workers is a mean over all ranks.
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = list(module.buffers())
        self._ranks = [[buffer.clone() for buffer in self._module] for _ in range(ranks)]

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Give the module, inside the block, the buffers of local rank `rank` (0 is the worker's first rank)."""
        for buffer, own in zip(self._module, self._ranks[rank], strict=True):
            buffer.copy_(own)
        try:
            yield
        finally:
            for own, buffer in zip(self._ranks[rank], self._module, strict=True):
                own.copy_(buffer)
            for buffer, *owned in zip(self._module, *self._ranks, strict=True):
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack(owned).mean(0))

    def reset(self) -> None:
        """Give every rank the module's buffers."""
        for owned in self._ranks:
            for own, buffer in zip(owned, self._module, strict=True):
                own.copy_(buffer)

    def state_dict(self) -> list[list[Tensor]]:
        """Return a list of buffers for each rank."""
        return self._ranks

    def load_state_dict(self, state: list[list[Tensor]]) -> None:
        """Continue from `state_dict()`."""
        for owned, saved in zip(self._ranks, state, strict=True):
            for own, buffer in zip(owned, saved, strict=True):
                own.copy_(buffer)


@dataclass
class Worker:
    """Everything that belongs to one worker.

    scaler:  scales the loss in fp16, else does nothing
    streams: batches and random numbers of its ranks. A process has one; a simulated worker draws for all its
             `ranks_per_worker` ranks and averages their gradients.
    buffers: the BatchNorm statistics of each of those ranks; None for one rank
    """

    index: int
    model: DataParallel
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler
    streams: list[Stream]
    buffers: RankBuffers | None = None

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """Run forward and backward as this worker's local rank number `rank`."""
        return self.buffers.of(rank) if self.buffers is not None else nullcontext()

    def share_buffers(self) -> None:
        """Give all ranks of this worker the statistics that its module holds."""
        if self.buffers is not None:
            self.buffers.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's whole state, plain values and tensors."""
        return {
            "index": self.index,
            "clock": self.model.clock,
            "model": without_shards(self.model.state_dict()),
            "communication": self.model.communication_state(),
            "optimizer": without_shards(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "streams": [stream.state_dict() for stream in self.streams],
            "buffers": self.buffers.state_dict() if self.buffers is not None else None,
            "counters": asdict(self.model.counters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`: the round that was in flight is launched again. Collective."""
        self.model.load_state_dict(module_state(state["model"], self.model))
        self.model.load_clock(state["clock"])
        self.model.load_communication_state(state["communication"])
        self.optimizer.load_state_dict(optimizer_state(state["optimizer"], self.optimizer))
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        for stream, saved in zip(self.streams, state["streams"] or (), strict=state["streams"] is not None):
            stream.load_state_dict(saved)
        if self.buffers is not None:
            self.buffers.load_state_dict(state["buffers"])
        for name, value in state["counters"].items():
            setattr(self.model.counters, name, value)


def build_workers(
    task: Task,
    config: Config,
    device: torch.device,
    rank: int,
    total_steps: int,
    steps_per_epoch: int,
    dealing: Dealing = BEGINNING,
    numbers: Sequence[int] | None = None,
) -> list[Worker]:
    """Build this process's workers: one, or all of a simulation. Collective when there are several processes.

    Raises ConfigError if the model does not fit into memory.

    dealing: where the data begin
    numbers: of the workers when the run began, which seed their random numbers; None: the same as now
    """
    torch.manual_seed(config.seed)
    try:
        module = task.build_model().to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"model={config.model.name}: does not fit into memory ({one_line(error)})") from error
    if config.init_from is not None:
        fill_model(module, read_model(config.init_from, "init_from="), f"init_from={config.init_from}")
    if config.sharded:
        shard(module, task.blocks(module), config.ranks_per_worker, device)
    local_batch = config.training.batch_size // (config.ranks * config.training.gradient_accumulation)
    workers = []
    for model in parallelize(module, config):
        if config.training.compile:
            model.module.compile()  # not earlier: copies in a simulation would stay uncompiled
        optimizer = model.attach(build_optimizer(config.optimizer, config.lr, model.module))
        first = model.worker * config.ranks_per_worker
        ranks = [rank] if config.workers.kind == "processes" else range(first, first + config.ranks_per_worker)
        buffers = RankBuffers(model.module, len(ranks)) if len(ranks) > 1 else None
        data = [task.train_data(r, config.ranks, local_batch, device) for r in ranks]
        number = model.worker if numbers is None else numbers[model.worker]
        streams = [
            Stream(
                d, config.seed, r, device, config.ranks, dealing, r + (number - model.worker) * config.ranks_per_worker
            )
            for d, r in zip(data, ranks, strict=True)
        ]
        schedule = build_schedule(config.schedule, optimizer, total_steps, steps_per_epoch)
        scaler = build_scaler(config, device)
        workers.append(Worker(model.worker, model, optimizer, schedule, scaler, streams, buffers))
    return workers


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a tensor did not fit into memory, or its size into 64 bits."""
    words = "can't allocate memory|Storage size calculation overflowed|integer multiplication overflow"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or re.search(words, str(error)) is not None


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler of a worker: torch's, or ours if torch's would skip a step that its peers take."""
    alone = config.n == 1 or config.parallel.method == "allreduce"  # or alike on all ranks: gradients are averaged
    scaler = torch.amp.GradScaler if alone else GradScaler
    return scaler(device.type, enabled=config.training.precision == "fp16")


def parallelize(module: nn.Module, config: Config) -> list[DataParallel]:
    """Give a bare module its parallel form: the only place that knows methods and where workers live."""
    parallel = config.parallel
    topology = config.build_topology()
    if config.workers.kind == "simulated":
        options: dict[str, Any] = {}
        if parallel.method == "decentralized":
            options = {"share_second_moment": parallel.share_second_moment, **parallel.options().keywords()}
        return list(
            simulate(module, config.n, parallel.method, topology, ranks_per_worker=parallel.ranks_per_worker, **options)
        )
    if parallel.method == "allreduce":
        return [
            AllReduceDataParallel(
                module,
                bucket_mb=parallel.bucket_mb,
                find_unused_parameters=parallel.find_unused_parameters,
                timeout_s=parallel.timeout_s,
                hook=parallel.hook,
                powersgd_rank=parallel.powersgd_rank,
                powersgd_from=parallel.powersgd_from,
            )
        ]
    return [
        DecentralizedDataParallel(
            module,
            topology,
            ranks_per_worker=parallel.ranks_per_worker,
            transport=parallel.transport,
            message_dtype=getattr(torch, parallel.message_dtype) if parallel.message_dtype else None,
            find_unused_parameters=parallel.find_unused_parameters,
            timeout_s=parallel.timeout_s,
            **parallel.options().keywords(),
        )
    ]
