"""One update's communication as plain arithmetic on the tensors of all workers, stacked as [N, P] matrices."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.optim import AccumAdamW
from common.parallel.collectives import sum_dtype
from common.parallel.counters import CommunicationCounters
from common.topology import Round, Transport, bytes_sent, messages_sent, transport_of
from common.transfer import to_device


def mix_(stacked: Tensor, matrix: np.ndarray) -> None:
    """Compute X <- W X in place; stacked [N, P] of any floating dtype (16-bit is mixed in float32), matrix [N, N]."""
    if np.array_equal(matrix, np.eye(len(matrix))):
        return
    wide = stacked.to(sum_dtype(stacked.dtype))
    weights = to_device(torch.as_tensor(matrix, dtype=wide.dtype), wide.device)
    stacked.copy_(weights @ wide)


def average_gradients_(replicas: Sequence[Sequence[nn.Parameter]]) -> None:
    """Give every worker the mean gradient, as DDP does; replicas[i] are worker i's parameters in one order.

    If only some workers have a gradient of a parameter, it counts as 0 on the others; if none has, all stay without.
    """
    for parameters in zip(*replicas, strict=True):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            continue
        mean = torch.stack(gradients).sum(0).div_(len(parameters))
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)


def count_gossip(
    counters: Sequence[CommunicationCounters], round_: Round, workers_per_host: int, chunks: Sequence[Tensor]
) -> None:
    """Add to each worker's counters what this round would have sent to mix its `chunks`, one message for each."""
    kind = transport_of(round_, workers_per_host)
    widened = kind in (Transport.SUBGROUP, Transport.HIERARCHICAL)  # travels in the dtype of the sum
    payloads = [c.numel() * (sum_dtype(c.dtype) if widened else c.dtype).itemsize for c in chunks]
    for worker, counter in enumerate(counters):
        for payload in payloads:
            counter.bytes_sent += bytes_sent(round_, worker, payload, kind, workers_per_host)
            counter.messages += messages_sent(round_, worker, kind, workers_per_host)


class SharedSecondMoments:
    """The second moments of all workers' AccumAdamWs; all workers attach theirs in the same order.

    An experiment: its messages are not counted.

    how: "mean":   in every update all use the same second moment, v + (1 - b2) mean_j g_j^2, with the current gradients
         "mixing": v_i <- sum_j w_ij v_j after every update, as for parameters: a worker uses v_i + (1 - b2) g_i^2
    """

    def __init__(self, how: Literal["mean", "mixing"], workers: int) -> None:
        self._how = how
        self._optimizers: list[list[AccumAdamW]] = [[] for _ in range(workers)]

    def add(self, worker: int, optimizer: AccumAdamW) -> None:
        """Share the second moments of this optimizer of a worker."""
        optimizer.init_state()
        self._optimizers[worker].append(optimizer)

    @torch.no_grad()
    def before_update(self) -> None:
        """Once all gradients are there, shift v_i so that what the optimizer adds makes it the shared second moment."""
        for parameters, moments, b2 in self._rows() if self._how == "mean" else ():
            squares = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad.square() for p in parameters])
            torch._foreach_add_(moments, list((1 - b2) * (squares.mean(0) - squares)))

    @torch.no_grad()
    def after_update(self, matrix: np.ndarray) -> None:
        """Average v, so that the shifts of `before_update` cancel, or mix it with this matrix [N, N]."""
        if self._how == "mean":
            matrix = np.full_like(matrix, 1 / len(matrix))
        for _, moments, _ in self._rows():
            stacked = torch.stack(moments).flatten(1)
            mix_(stacked, matrix)
            torch._foreach_copy_(moments, [row.view_as(m) for row, m in zip(stacked, moments, strict=True)])

    def _rows(self) -> Iterator[tuple[tuple[nn.Parameter, ...], list[Tensor], float]]:
        """Yield every parameter of all workers, its second moments, and b2."""
        for optimizers in zip(*self._optimizers, strict=True):
            for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
                for parameters in zip(*(group["params"] for group in groups), strict=True):
                    states = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
                    yield parameters, [state["exp_avg_sq"] for state in states], groups[0]["betas"][1]
