"""Shared second moments against plain matrix arithmetic in numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.optim import AccumAdam, AccumAdamW
from common.simulate import simulate
from common.topology import build

N, P, LR, B1, B2, EPS, DECAY = 4, 5, 0.1, 0.8, 0.9, 1e-3, 0.3
GENERATOR = np.random.default_rng(0)
A, TARGET = GENERATOR.normal(size=(2, N, P))
START = GENERATOR.normal(size=P)


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(START))

    def forward(self, worker: int) -> Tensor:
        return (torch.tensor(A[worker]) * (self.x - torch.tensor(TARGET[worker])) ** 2).sum() / 2


def by_hand(how: str | None, s: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x and v of all workers, [N, P], after these updates, gossiping while adapting."""
    x, m, v, a = np.tile(START, (N, 1)), *np.zeros((3, N, P))
    topology = build("one_peer_exponential", N)
    for k in range(1, steps + 1):
        W = topology.matrix(k - 1)
        share = {"mean": np.full((N, N), 1 / N), "mixing": W, None: np.eye(N)}[how]
        g = A * (x - TARGET)
        a += g / s
        own = v + (1 - B2) * g**2
        divided_by = own.mean(0) if how == "mean" else own
        c1, c2 = (1 - beta ** -(-k // s) for beta in (B1, B2))
        x = (1 - LR * DECAY) * (W @ x) - LR * (m + (1 - B1) * g) / c1 / (np.sqrt(divided_by / c2) + EPS)
        if k % s == 0:
            m, v = B1 * (m + (1 - B1) * a), B2 * (v + (1 - B2) * a**2)
            a = np.zeros_like(a)
        v = share @ v
    return x, v


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("how", ["mean", "mixing", None])
def test_sharing_is_matrix_arithmetic(how: str | None, s: int) -> None:
    replicas = simulate(Quadratic(), N, topology="one_peer_exponential", share_second_moment=how)
    options = {"betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "accumulation_steps": s}
    optimizers = [replica.attach(AccumAdamW(replica.parameters(), LR, **options)) for replica in replicas]
    for _ in range(7):
        for worker, replica in enumerate(replicas):
            replica(worker).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [next(iter(optimizer.state.items())) for optimizer in optimizers]
    x, v = by_hand(how, s, 7)
    np.testing.assert_allclose([parameter.detach() for parameter, _ in found], x, rtol=1e-9)
    np.testing.assert_allclose([state["exp_avg_sq"] for _, state in found], v, rtol=1e-9)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="share_second_moment='mean' with method='allreduce'"):
        simulate(Quadratic(), N, "allreduce", share_second_moment="mean")
    replica = simulate(Quadratic(), N, share_second_moment="mean")[0]
    for optimizer in (AccumAdam(replica.parameters()), torch.optim.AdamW(replica.parameters())):
        with pytest.raises(ValueError, match="with share_second_moment: expected an AccumAdamW"):
            replica.attach(optimizer)
