"""A peer dies in the middle of a round: the others finish the update, and what they miss mixes with W = I."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.flat import flatten
from common.parallel.collectives import PeerError
from common.parallel.gossip.network import Network
from common.parallel.making_groups import abort_groups
from common.topology import build
from tests.cuda.device import idle_streams
from tests.distributed.processes import collect
from tests.distributed.scenarios import OPTIMIZERS, Scenario, real
from tests.naming import case

N, DEAD, STOP = 4, 1, 2  # rank DEAD dies while it launches round STOP
RING = Scenario(topology="ring", options={"bucket_mb": 0.0001, "timeout_s": 20})
OTHERS = [
    replace(RING, topology="complete", workers_per_host=2),
    replace(RING, topology="complete", options={**RING.options, "transport": "subgroup"}),
    replace(RING, order="atc", workers_per_host=2),
]


def surviving_on_streams(*arguments: Any) -> dict[str, Any]:
    """Do as `surviving`, by the branch for GPUs."""
    with idle_streams():
        return surviving(*arguments)


def surviving(rank: int, n: int, scenario: Scenario, buckets: int, folder: Path, torn: bool = False) -> dict[str, Any]:
    """Train until rank DEAD dies with `buckets` buckets of round STOP under way; torn: what arrives then may be so."""
    training = real(rank, scenario)
    model, (vector,) = training.model, training.model.mixer.vectors
    model.survive(abort_groups, lambda: torn and model.clock == STOP)
    training.run(range(STOP - (scenario.order == "awc")))
    if rank == DEAD:
        _die_after(buckets, vector.data, folder)
    if scenario.order == "awc":
        training.run([STOP - 1])
    before = vector.data.clone()
    training.backward(STOP)
    begin = time.monotonic()
    training.update()
    seconds = time.monotonic() - begin
    with pytest.raises(PeerError):
        model.consensus_distance()
    result = {
        "before": before.numpy(),
        "after": vector.data.numpy().copy(),
        "spans": [bucket.span for bucket in model.mixer.buckets],
        "merged": model.merged_of_broken,
        "clock": model.clock,
        "seconds": seconds,
    }
    model.abandon()
    return result


def _die_after(buckets: int, x: torch.Tensor, folder: Path) -> None:
    post, left = Network.post, buckets

    def limited(self: Network, exchanges: Sequence[Any]) -> None:
        nonlocal left
        post(self, exchanges[:left])
        left -= len(exchanges)
        if left < 0:
            np.save(folder / "x.npy", x.numpy())
            time.sleep(0.3)  # until what was posted has arrived
            os._exit(1)

    Network.post = limited


def stepped(scenario: Scenario, rank: int, before: np.ndarray, merged: np.ndarray) -> np.ndarray:
    """Return `merged` plus the displacement of update STOP, whose gradient is taken at `before`; all [P]."""
    module = scenario.build()
    (vector,) = flatten(module)
    vector.data.copy_(torch.from_numpy(before))
    scenario.loss(module, rank, STOP).backward()
    vector.data.copy_(torch.from_numpy(merged))
    OPTIMIZERS[scenario.optimizer](module.parameters()).step()
    return vector.data.numpy()


def check(
    scenario: Scenario, buckets: int, folder: Path, function: Callable = surviving, torn: bool = False
) -> dict[int, int | None]:
    """Compare survivors with matrix arithmetic; return how many buckets each merged."""
    outcomes = collect(function, N, (scenario, buckets, folder, torn))
    results = {}
    for rank in range(N):
        ok, results[rank] = outcomes[rank]
        assert ok or rank == DEAD, results[rank]
    del results[DEAD]
    awc = scenario.order == "awc"
    sent = {DEAD: np.load(folder / "x.npy")}
    for rank, result in results.items():
        x = result["before"]
        sent[rank] = x if awc else stepped(scenario, rank, x, x)
    X = np.stack([sent[rank] for rank in range(N)])
    W = build(scenario.topology, N, scenario.workers_per_host).matrix(STOP)
    for rank, result in results.items():
        assert result["clock"] == STOP + 1
        assert result["seconds"] < 10
        merged = X[rank].copy()
        for span in result["spans"][: result["merged"]]:
            merged[span] = W[rank] @ X[:, span]
        expected = stepped(scenario, rank, result["before"], merged) if awc else merged
        np.testing.assert_allclose(result["after"], expected, atol=1e-6, err_msg=f"rank {rank}")
    return {rank: result["merged"] for rank, result in results.items()}


@pytest.mark.parametrize("buckets", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_buckets_that_fail_keep_their_own_values(buckets: int, tmp_path: Path) -> None:
    """Rank 3 has no link to the dead one: it merges the whole round."""
    assert check(RING, buckets, tmp_path) == {0: buckets, 2: buckets, 3: None}


@pytest.mark.parametrize("torn", [False, True])
def test_on_gpus_a_batch_arrives_or_does_not(torn: bool, tmp_path: Path) -> None:
    """NCCL's messages also seem to arrive when they are aborted: only the groups tell."""
    merged = {0: 0, 2: 0, 3: 0 if torn else None}
    assert check(RING, 2, tmp_path, surviving_on_streams, torn) == merged


@pytest.mark.slow
def test_all_reduces_messages_between_hosts_and_atc(tmp_path: Path) -> None:
    for index, scenario in enumerate(OTHERS):
        with case(scenario.topology, scenario.order, scenario.options):
            folder = tmp_path / str(index)
            folder.mkdir()
            merged = check(scenario, 2, folder)
            assert merged[0] is not None
            assert merged[0] <= 2
