"""Measures the gradient noise scale (`common.noise_scale`) of a run, which stays the same bit for bit.

All-reduce averages gradients at equal weights, so their norms before and after are at hand. Simulated workers that
gossip have different weights; after an evaluation, extra passes over the upcoming batches compute gradients at the mean
weights. Real workers that gossip would have to wait for each other to do that, so they are not measured.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.config.config import Config
from common.noise_scale import KINDS, noise_row, signal_and_noise, smoothed
from common.optim import AccumAdam
from common.parallel.averaging import restored
from common.training.device import autocast
from common.training.task import Task
from common.training.worker import Worker

INTERVALS = 5  # per extra pass of all workers: with the default of 10 steps these are 2 % of all passes
FLOOR = 1e-3

Factors = Sequence[Tensor | None]  # of the gradient of each parameter


class NoiseMeter:
    """Measures the gradients of the local workers, every `logging.noise_scale_every` steps.

    sums:       from `common.noise_scale.smoothed`, [kinds, 2]; their means over processes are means over all workers
    in_updates: whether it measures the gradients of updates
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(len(KINDS), 2, dtype=torch.float64)
        self.in_updates = False
        self._measured = 0  # the step of the last measurement

    def begin(self, task: Task, workers: Sequence[Worker], config: Config) -> None:
        """Measure these workers from now on."""
        self._task, self._workers, self._config = task, workers, config
        self._simulated, self._every = config.workers.kind == "simulated", config.logging.noise_scale_every
        self._parameters = _trained(workers[0])
        self.sums = self.sums.to(next(workers[0].model.parameters()).device)
        averaged = config.parallel.method == "allreduce" and (config.n if self._simulated else config.ranks) > 1
        self.in_updates = self._every is not None and averaged and config.parallel.hook is None
        self._after_evaluations = self._every is not None and self._simulated and not averaged
        passes = config.training.gradient_accumulation
        self._of_pass = task.samples(workers[0].streams[0].data)
        self._of_gradient = self._of_pass * passes * len(workers[0].streams)
        self._local = self._of_pass * passes * config.ranks_per_worker
        self._everyone = self._local * config.n

    def release(self) -> None:
        """Let go of the workers."""
        self._workers, self._parameters = [], []

    def row(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the metrics of flattened sums."""
        return noise_row([sums[:2], sums[2:]], self._local, self._everyone)

    @contextmanager
    def of_update(self, step: int) -> Iterator[None]:
        """Measure the gradients that backward computes in this block for update number `step`, if they are due.

        Gradients are measured before clipping, as means over micro-batches and over the ranks that this process runs.
        """
        if not self.in_updates or step % self._every:
            yield
            return
        model, factors = self._workers[0].model, preconditioner(self._workers[:1])
        if self._simulated:
            yield
            each = [_squares(_gradients(_trained(worker)), factors) for worker in self._workers]
            small = torch.stack(each).mean(0)
            model.synchronize_gradients()
        else:
            with _before_averaging(self._parameters, factors) as squares:
                yield
            small = torch.stack(list(squares.values())).sum(0)
        self._add(step, small, _squares(_gradients(self._parameters), factors), self._of_gradient, self._everyone)

    def after_evaluation(self, mean_model: nn.Module, step: int) -> dict[str, float]:
        """Return the metrics of gradients at the mean weights, which the module holds; none if no pass is due.

        All batches see the same weights, so their mean gradient is that of one large batch.
        """
        if not self._after_evaluations:
            return {}
        every = INTERVALS * self._every
        streams = [stream for worker in self._workers for stream in worker.streams]
        passes = (step // every - self._measured // every) * len(streams)
        if passes < 2:
            return {}
        streams = [stream.lookahead() for stream in streams]
        factors, scaler = preconditioner(self._workers), self._workers[0].scaler
        small, total = torch.zeros_like(self.sums[0]), [torch.zeros_like(p) for p in self._parameters]
        mean_model.train()
        with restored(mean_model, list(mean_model.buffers())), torch.enable_grad():
            for stream in itertools.islice(itertools.cycle(streams), passes):
                with stream.random.active(), autocast(self._config.training.precision, self.sums.device):
                    loss = self._task.loss(mean_model, next(stream))
                # Not with backward(): hooks on the gradients of updates must not fire.
                gradients = torch.autograd.grad(scaler.scale(loss), self._parameters, materialize_grads=True)
                small += _squares(gradients, factors) / passes
                torch._foreach_add_(total, gradients, alpha=1 / passes)
        self._add(step, small, _squares(total, factors), self._of_pass, passes * self._of_pass)
        return self.row(self.sums.flatten().tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to write the same metrics."""
        return {"sums": self.sums, "measured": self._measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.sums, self._measured = state["sums"], state["measured"]

    def _add(self, step: int, small_square: Tensor, big_square: Tensor, small: float, big: float) -> None:
        """Add squared norms [kinds] of gradients of the scaled loss to the sums."""
        scale = self._workers[0].scaler.scale(torch.ones((), device=self.sums.device))
        found = signal_and_noise(small_square / scale**2, big_square / scale**2, small, big)
        self.sums = smoothed(self.sums, torch.stack(found, dim=1), (step - self._measured) / self._every)
        self._measured = step


def preconditioner(workers: Sequence[Worker]) -> list[Tensor | None]:
    """Return 1 / (sqrt(v) + eps) for each trained parameter; None where its optimizer has no second moment (yet).

    v is the mean of these workers' second moments, corrected for bias. It comes from earlier updates, so it does not
    depend on the gradients that it weighs. Elements with hardly any gradient so far would weigh the next one as no
    update does, because an update's v includes the new gradient: so v is at least FLOOR times its parameter's mean.
    """
    factors: list[Tensor | None] = []
    for found in zip(*map(_second_moments, workers), strict=True):
        if any(one is None for one in found):
            factors.append(None)
        else:
            v = sum(moment for moment, _ in found) / len(found)
            factors.append(1 / (v.clamp(min=FLOOR * v.mean()).sqrt() + found[0][1]))
    return factors


def _second_moments(worker: Worker) -> list[tuple[Tensor, float] | None]:
    """Return the corrected second moment of each trained parameter, and its eps."""
    optimizer = worker.optimizer
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found: list[tuple[Tensor, float] | None] = []
    for parameter in _trained(worker):
        state, group = optimizer.state.get(parameter, {}), group_of.get(parameter, {})
        if "exp_avg_sq" not in state or state.get("windows") == 0:
            found.append(None)
            continue
        beta2 = group["betas"][1]
        correction = 1 - beta2 ** state["step"]
        if isinstance(optimizer, AccumAdam):  # it counts windows, and stores moments already decayed
            correction = beta2 * (1 - beta2 ** state["windows"])
        found.append((state["exp_avg_sq"] / correction, group["eps"]))
    return found


@contextmanager
def _before_averaging(parameters: Sequence[nn.Parameter], factors: Factors) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Yield the squares [kinds] of each parameter's gradient, as the last backward leaves it before DDP averages it."""
    squares: dict[nn.Parameter, Tensor] = {}

    def hook(factor: Tensor | None) -> Callable[[nn.Parameter], None]:
        def measure(parameter: nn.Parameter) -> None:
            squares[parameter] = _squares([parameter.grad], [factor])

        return measure

    pairs = zip(parameters, factors, strict=True)
    handles = [parameter.register_post_accumulate_grad_hook(hook(factor)) for parameter, factor in pairs]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _squares(gradients: Sequence[Tensor | None], factors: Factors) -> Tensor:
    """Return squared norms [kinds] of the gradients: plain, and times the factors (NaN if one is missing)."""
    found = [(g, f) for g, f in zip(gradients, factors, strict=True) if g is not None]
    kinds = [[g for g, _ in found]]
    if all(f is not None for _, f in found):
        kinds.append(torch._foreach_mul(kinds[0], [f for _, f in found]))
    squares = [torch.stack(torch._foreach_norm(kind)).double().square().sum() for kind in kinds]
    return torch.stack(squares if len(squares) == len(KINDS) else [*squares, torch.full_like(squares[0], math.nan)])


def _trained(worker: Worker) -> list[nn.Parameter]:
    return [parameter for parameter in worker.model.parameters() if parameter.requires_grad]


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    return [parameter.grad for parameter in parameters]
