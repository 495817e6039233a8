"""Small trainings that run alike in real processes and in the simulator, for tests that compare the two."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.dtensors import is_dtensor
from common.optim import AccumAdam, AccumAdamW, DmSGD, QGDmSGD
from common.optim import compiled as kernels
from common.parallel import AllReduceDataParallel, DataParallel, DecentralizedDataParallel, GradScaler
from common.simulate import simulate
from common.topology import Topology
from tests.distributed.models import mlp

EPS = 1e-3  # with PyTorch's 1e-8 the first steps turn rounding, which differs by processor, into signs
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003, eps=EPS, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003, eps=EPS, weight_decay=0.1),
    "accumadam": lambda p: AccumAdam(p, lr=0.003, eps=EPS, weight_decay=0.01, accumulation_steps=3),
    "accumadamw": lambda p: AccumAdamW(p, lr=0.003, eps=EPS, weight_decay=0.1, accumulation_steps=4),
    "fused_accumadamw": lambda p: AccumAdamW(p, lr=0.003, eps=EPS, weight_decay=0.1, accumulation_steps=4, fused=True),
    "dmsgd": lambda p: DmSGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "dmsgd_local": lambda p: DmSGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, momentum_mixing=False),
    "qg_dmsgd": lambda p: QGDmSGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "fused_adam": lambda p: torch.optim.Adam(p, lr=0.003, fused=True),
    "still": lambda p: torch.optim.SGD(p, lr=0.0),
}
BUCKET_MB = 0.001  # small, so that every vector is cut
KERNELS = {False: kernels.written_kernel, True: kernels.fused_kernel}


@dataclass(frozen=True)
class Scenario:
    """What is trained.

    optimizer:  a key of OPTIMIZERS; "a+b" attaches two, each to one half of the parameters
    compiled:   whether a fused update is compiled, which takes seconds in each process, or runs as it is written
    accumulate: backward passes for each update
    scaler:     class of each worker's loss scaler; its scale doubles after 3 steps without an overflow
    overflows:  {(rank, step): what the last parameter's gradient holds then}
    device, dtype: of the parameters and batches
    local:      arguments of the wrapper and of the simulator that concern local steps
    options:    further arguments of the wrapper; the simulator knows none of them
    """

    model: Callable[[], nn.Module] = mlp
    inputs: tuple[int, ...] = (5,)
    optimizer: str = "sgd"
    compiled: bool = False
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    steps: int = 20
    accumulate: int = 1
    clip: float | None = None
    scaler: type[torch.amp.GradScaler] | None = None
    overflows: Mapping[tuple[int, int], float] = field(default_factory=dict)
    method: str = "decentralized"
    topology: str | Topology = "complete"
    workers_per_host: int = 1
    ranks_per_worker: int = 1
    order: str | None = "awc"
    phases: str = "aligned"
    push_sum: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    local: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 7) -> nn.Module:
        torch.manual_seed(seed)
        return self.model().to(self.device, None if self.dtype == torch.float32 else self.dtype)

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        parameters, names = list(model.parameters()), self.optimizer.split("+")
        size = -(-len(parameters) // len(names))
        return [OPTIMIZERS[name](parameters[i * size : (i + 1) * size]) for i, name in enumerate(names)]

    def batch(self, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return batch number `index` of a rank; it depends on nothing else."""
        generator = torch.Generator().manual_seed(1 + rank + 100 * index)
        x, y = torch.randn(8, *self.inputs, generator=generator), torch.randn(8, 3, generator=generator)
        return x.to(self.device, self.dtype), y.to(self.device)

    def loss(self, model: nn.Module, rank: int, step: int, micro: int = 0) -> torch.Tensor:
        x, y = self.batch(rank, step * self.accumulate + micro)
        bare = getattr(model, "module", model)
        context = {"worker": rank, "step": step} if getattr(bare, "conditional", False) else {}
        return (model(x, **context).float() - y).square().mean()


class Training:
    """A scenario in progress on the workers that live in this process: one real, or all simulated ones.

    ranks[i]:     the ranks whose batches worker i sees, several where `ranks_per_worker` of them share a replica
    scales[t][i]: worker i's scale of the loss after step t
    """

    def __init__(self, scenario: Scenario, models: Sequence[DataParallel], ranks: Sequence[Sequence[int]]) -> None:
        kernels.fused_kernel = KERNELS[scenario.compiled]
        self.scenario, self.models, self.ranks = scenario, models, ranks
        self.optimizers = [[m.attach(o) for o in scenario.optimizers(m)] for m in models]
        self.schedules = {o: scenario.schedule(o) for os in self.optimizers for o in os if scenario.schedule}
        options = {"init_scale": 2.0**10, "growth_interval": 3} if scenario.scaler else {"enabled": False}
        self.scalers = [(scenario.scaler or GradScaler)(scenario.device, **options) for _ in models]
        self.scales: list[list[float]] = []
        self._running = (0, 0)  # rank and step
        for model in models if scenario.overflows else ():
            next(reversed(list(model.parameters()))).register_hook(self._overflow)

    @property
    def model(self) -> DataParallel:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0][0]

    def backward(self, step: int) -> None:
        scenario = self.scenario
        for model, ranks, scaler in zip(self.models, self.ranks, self.scalers, strict=True):
            for micro in range(scenario.accumulate):
                last = micro == scenario.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    for rank in ranks:
                        self._running = rank, step
                        loss = scenario.loss(model, rank, step, micro) / (scenario.accumulate * len(ranks))
                        scaler.scale(loss).backward()
        for model, scaler, optimizers in zip(self.models, self.scalers, self.optimizers, strict=True):
            model.synchronize_gradients()
            if scenario.clip is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)

    def update(self) -> None:
        for scaler, optimizers in zip(self.scalers, self.optimizers, strict=True):
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
                if optimizer in self.schedules:
                    self.schedules[optimizer].step()
            scaler.update()
        self.scales.append([scaler.get_scale() for scaler in self.scalers])

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0] = self.scenario.overflows.get(self._running, gradient[0])
        return gradient

    def run(self, steps: Iterable[int]) -> "Training":
        for step in steps:
            self.backward(step)
            self.update()
        return self

    def results(self) -> list[dict[str, Any]]:
        """Return what is compared, for each worker in this process."""
        results = []
        for model, *scales in zip(self.models, *self.scales, strict=True):
            distance, counters = model.consensus_distance(), replace(model.counters)
            with model.averaged() as mean:
                averaged = snapshot(mean)
            state = snapshot(model)
            results.append(
                {"state": state, "mean": averaged, "distance": distance, "counters": counters, "scales": scales}
            )
        return results


def wrap(module: nn.Module, scenario: Scenario) -> DataParallel:
    """Return the module in its parallel form on this rank."""
    if scenario.method == "allreduce":
        return AllReduceDataParallel(module, **{"timeout_s": 30} | scenario.options)
    return DecentralizedDataParallel(
        module,
        scenario.topology,
        scenario.order,
        scenario.ranks_per_worker,
        workers_per_host=scenario.workers_per_host,
        phases=scenario.phases,
        push_sum=scenario.push_sum,
        **{"bucket_mb": BUCKET_MB, "timeout_s": 30} | scenario.local | scenario.options,
    )


def real(rank: int, scenario: Scenario) -> Training:
    """Begin the scenario on this rank, with other parameters than other ranks: rank 0's must reach everybody."""
    return Training(scenario, [wrap(scenario.build(seed=7 + rank), scenario)], [[rank]])


def simulated(n: int, scenario: Scenario) -> Training:
    """Begin the scenario on n simulated workers."""
    replicas = simulate(
        scenario.build(),
        n,
        scenario.method,
        scenario.topology,
        scenario.workers_per_host,
        scenario.order,
        bucket_mb=BUCKET_MB,
        phases=scenario.phases,
        push_sum=scenario.push_sum,
        **scenario.local,
    )
    k = scenario.ranks_per_worker
    return Training(scenario, replicas, [range(worker * k, (worker + 1) * k) for worker in range(n)])


def in_process(rank: int, n: int, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the results of the scenarios on this rank; to be called by `run_processes`."""
    results = []
    for scenario in scenarios:
        training = real(rank, scenario).run(range(scenario.steps))
        results += training.results()
        training.model.close()
    return results


def in_simulation(n: int, scenario: Scenario) -> list[dict[str, Any]]:
    """Return the results of the same training on simulated workers, one for each of n ranks."""
    k = scenario.ranks_per_worker
    results = simulated(n // k, scenario).run(range(scenario.steps)).results()
    return [results[rank // k] for rank in range(n)]


def snapshot(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the module's state as float64 arrays (which hold the bits of any narrower dtype), shards gathered."""
    state = module.state_dict().items()
    whole = {name: tensor.full_tensor() if is_dtensor(tensor) else tensor for name, tensor in state}
    return {name: tensor.detach().double().cpu().numpy().copy() for name, tensor in whole.items()}
