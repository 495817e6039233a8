"""One update's communication as plain arithmetic on stacked [N, P] matrices."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from common.parallel.collectives import sum_dtype
from common.parallel.counters import CommunicationCounters
from common.topology import Round, Transport, bytes_sent, messages_sent, transport_of
from common.transfer import to_device


def mix_(stacked: Tensor, matrix: np.ndarray) -> None:
    """Compute X <- W X in place; stacked [N, P] any floating dtype (16-bit is mixed in float32), matrix [N, N]."""
    if np.array_equal(matrix, np.eye(len(matrix))):
        return
    wide = stacked.to(sum_dtype(stacked.dtype))
    weights = to_device(torch.as_tensor(matrix, dtype=wide.dtype), wide.device)
    stacked.copy_(weights @ wide)


def average_gradients_(replicas: Sequence[Sequence[nn.Parameter]]) -> None:
    """Give every worker the mean gradient, as DDP does; replicas[i] are worker i's parameters in one order.

    A parameter that got a gradient on some workers only counts as 0 on the others; on none, it stays without.
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


def count_allreduce(counters: Sequence[CommunicationCounters], ranks: int, gradient_bytes: int) -> None:
    """Add to each worker's counters what a rank would have sent in a ring all-reduce of the gradients."""
    for counter in counters:
        counter.rounds += 1
        counter.bytes_sent += 2 * (ranks - 1) / ranks * gradient_bytes
        counter.messages += 2 * (ranks - 1)
