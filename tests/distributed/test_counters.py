"""Bytes and messages against numbers computed by hand, and what holds for times."""

from dataclasses import replace

import pytest
import torch

from common.parallel import CommunicationCounters
from tests.distributed import models
from tests.distributed.processes import run_processes
from tests.distributed.scenarios import Scenario, real

S = (16 * 16 + 3 * 16) * 4  # bytes of the model `aligned`
BUCKETS = 2
STEPS = 6
BASE = Scenario(
    model=models.aligned, inputs=(16,), optimizer="momentum", steps=STEPS, options={"bucket_mb": 640 / 2**20}
)
QUARTER = BASE.options | {"bucket_mb": 160 / 2**20}  # of a message: an all-reduce of four ranks cuts a bucket into four
# On each of 4 ranks, after 6 steps: bytes, messages
EXPECTED: list[tuple[Scenario, float, int]] = [
    (replace(BASE, topology="ring"), STEPS * 2 * S, STEPS * 2 * BUCKETS),
    (replace(BASE, topology="one_peer_exponential"), STEPS * S, STEPS * BUCKETS),
    # Every rank crosses to another host in one of two rounds, and is alone in the other.
    (replace(BASE, topology="aer"), STEPS / 2 * S, STEPS // 2 * BUCKETS),
    # Two hosts of two: a pair inside, then half of S to the other rank, to the other host, and back inside.
    (replace(BASE, topology="aer", workers_per_host=2), STEPS / 2 * (S + 1.5 * S), STEPS // 2 * (1 + 3) * BUCKETS),
    # By all-reduces of two and of four: 2 (g - 1) / g S each in 2 (g - 1) messages.
    (
        replace(BASE, topology="aer", workers_per_host=2, options=BASE.options | {"transport": "subgroup"}),
        STEPS / 2 * (S + 1.5 * S),
        STEPS // 2 * (2 + 6) * BUCKETS,
    ),
    (replace(BASE, topology="complete", workers_per_host=2), STEPS * 1.5 * S, STEPS * 3 * BUCKETS),
    (replace(BASE, topology="complete", options=QUARTER), STEPS * 1.5 * S, STEPS * 6 * BUCKETS),
    (
        replace(BASE, topology="complete", options=QUARTER | {"transport": "send_recv"}),
        STEPS * 3 * S,
        STEPS * 3 * BUCKETS,
    ),
    (
        replace(BASE, topology="ring", options=BASE.options | {"message_dtype": torch.bfloat16}),
        STEPS * S,
        STEPS * 2 * BUCKETS,
    ),
    (  # 8 bits for each element and a scale for each bucket
        replace(BASE, topology="ring", options=BASE.options | {"message_dtype": torch.int8}),
        STEPS * 2 * (S / 4 + 4 * BUCKETS),
        STEPS * 2 * BUCKETS,
    ),
    (  # a pair in 16 bits; then half of S inside and back in 32, and half of S in 16 bits between hosts
        replace(BASE, topology="aer", workers_per_host=2, options=BASE.options | {"message_dtype": torch.bfloat16}),
        STEPS / 2 * (S / 2 + S + S / 4),
        STEPS // 2 * (1 + 3) * BUCKETS,
    ),
    (
        replace(BASE, topology="one_peer_exponential", order="atc", optimizer="dmsgd"),
        STEPS * 2 * S,
        STEPS * 2 * BUCKETS,
    ),
    (replace(BASE, method="allreduce", options={}), STEPS * 1.5 * S, STEPS * 6),
    (replace(BASE, method="allreduce", options={"hook": "fp16"}), STEPS * 1.5 * S / 2, STEPS * 6),
    (  # three backward passes whole; then of each weight two vectors: 16 + 16 and 3 + 16 numbers
        replace(BASE, method="allreduce", options={"hook": "powersgd", "powersgd_from": 3}),
        1.5 * (3 * S + (STEPS - 3) * (32 + 19) * 4),
        STEPS * 6,
    ),
]


def counted(rank: int, n: int) -> list[CommunicationCounters]:
    results = []
    for scenario, _, _ in EXPECTED:
        training = real(rank, scenario).run(range(STEPS))
        counters = training.model.counters
        results.append(replace(counters))
        with training.model.averaged():
            pass
        training.model.drain()
        assert counters.launch_to_merge_s >= counters.exposed_s >= 0
        counters.reset()
        assert counters == CommunicationCounters()
        training.run(range(STEPS, STEPS + 2))
        assert counters.rounds == 2
        training.model.close()
    return results


@pytest.fixture(scope="module")
def outcome() -> list[list[CommunicationCounters]]:
    return run_processes(counted, 4)


@pytest.mark.parametrize("index", range(len(EXPECTED)))
def test_bytes_and_messages(outcome: list[list[CommunicationCounters]], index: int) -> None:
    scenario, bytes_sent, messages = EXPECTED[index]
    for rank in range(4):
        counters = outcome[rank][index]
        assert (counters.bytes_sent, counters.messages, counters.rounds) == (bytes_sent, messages, STEPS), scenario
        assert counters.launch_to_merge_s >= counters.exposed_s >= 0
        assert (counters.exposed_s > 0) == (scenario.method == "decentralized")
