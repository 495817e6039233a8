"""Training with narrow messages: digits are learned as well as with full ones."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cnn.digits import load_digits
from cnn.model import SmallResNet
from common.optim import AccumAdamW
from common.parallel import DecentralizedDataParallel, Outer
from tests.distributed.processes import run_processes

STEPS, BATCH = 60, 32
DTYPES = [None, torch.bfloat16, torch.int8]


def accuracies(rank: int, n: int, topology: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (validation accuracy of the mean model, MB sent by this rank) for each of DTYPES, from the same start."""
    (images, labels), (validation, targets) = load_digits(0.2)
    results = []
    for dtype in DTYPES:
        torch.manual_seed(0)
        model = DecentralizedDataParallel(SmallResNet(1, 10, 8), topology, message_dtype=dtype, timeout_s=60, **options)
        optimizer = model.attach(AccumAdamW(model.parameters(), lr=0.005, accumulation_steps=2))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,), generator=generator)
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.averaged() as mean, torch.no_grad():
            mean.eval()
            accuracy = (mean(validation).argmax(1) == targets).double().mean().item()
        results.append((accuracy, model.counters.bytes_sent / 1e6))
        model.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("one_peer_exponential", {}),
        ("aer", {"workers_per_host": 2}),
        ("one_peer_exponential", {"local_steps": 5, "outer": Outer(lr=0.7, momentum=0.5)}),
    ],
    ids=["every update", "hosts", "local steps"],
)
def test_digits_are_learned_as_well(topology: str, options: dict[str, Any]) -> None:
    (full, full_mb), (half, half_mb), (eighth, eighth_mb) = run_processes(accuracies, 4, topology, options)[0]
    assert full > 0.93
    assert half > full - 0.02
    assert eighth > full - 0.02
    if "workers_per_host" in options:
        assert eighth_mb < half_mb < full_mb
    else:
        assert half_mb == pytest.approx(full_mb / 2)
        assert eighth_mb == pytest.approx(full_mb / 4, rel=0.01)  # and the scales
