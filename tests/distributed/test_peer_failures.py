"""A peer that stops early or dies: the others get an error that names what they waited for, in time."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from common.parallel.gossip.hierarchical import Hierarchical
from tests.distributed.processes import collect, run_processes
from tests.distributed.scenarios import Scenario, real

TIMEOUT_S, STOP = 3.0, 4  # rank 1 makes STOP updates
BASE = Scenario(topology="one_peer_exponential", options={"timeout_s": TIMEOUT_S})
MESSAGE = (
    r"rank (?P<rank>\d): gossip step (?P<step>\d+) failed exchanging with rank\(s\) \[(?P<peers>.*)\], "
    r"bucket \d of [12], .* \(.+\)$"  # what the backend says
)
SCENARIOS = [
    BASE,
    replace(BASE, topology="ring"),
    replace(BASE, topology="complete"),
    replace(BASE, order="atc", optimizer="dmsgd"),
]


def training_for_ever(rank: int, n: int, scenario: Scenario, how: str) -> tuple[float, str] | None:
    """Rank 1 stops; the others return the seconds from then on until the error, and the error."""
    training = real(rank, scenario).run(range(STOP))
    if rank == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(TIMEOUT_S + 2)
        return None
    if how == "dies":
        time.sleep(0.5)  # some find the connection closed already when they send
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        training.run(range(STOP, 1000))
    return time.monotonic() - begin, str(error.value)


def check(outcome: tuple[bool, Any], rank: int, peers: set[str], topology: str) -> None:
    ok, result = outcome
    assert ok, result
    seconds, message = result
    assert seconds < 2 * TIMEOUT_S
    found = re.match(MESSAGE, message, re.DOTALL)
    assert found, message
    assert int(found["rank"]) == rank
    assert set(found["peers"].split(", ")) == peers
    assert int(found["step"]) in (STOP, STOP + 1)  # the message of step STOP may have left before
    assert topology in message


@pytest.mark.parametrize("how", ["dies", "stops early"])
def test_the_others_raise_in_time(how: str) -> None:
    with ThreadPoolExecutor() as pool:  # what takes time is waiting
        outcomes = list(pool.map(lambda s: collect(training_for_ever, 3, (s, how)), SCENARIOS))
    for scenario, ranks in zip(SCENARIOS, outcomes, strict=True):
        for rank, peers in {0: {"1", "2"}, 2: {"0", "1"}}.items():
            check(ranks[rank], rank, peers, scenario.topology)


@pytest.mark.parametrize("how", ["dies", pytest.param("stops early", marks=pytest.mark.slow)])
def test_a_failure_between_hosts_reaches_everybody_in_time(how: str) -> None:
    """Two hosts of two: rank 1 leaves its host waiting for its part of each piece, and the other host on its rail."""
    scenario = replace(BASE, topology="complete", workers_per_host=2)
    outcomes = collect(training_for_ever, 4, (scenario, how))
    for rank, peers in {0: {"1", "2"}, 2: {"0", "3"}, 3: {"1", "2"}}.items():
        check(outcomes[rank], rank, peers, "complete")


def broken_stage(rank: int, n: int) -> None:
    """Let the thread that carries messages on fail, and expect its error from the training."""

    def fail(self: Hierarchical, timeout: timedelta) -> None:
        raise ValueError("an odd end")

    Hierarchical._combine_and_gather = fail
    with pytest.raises(ValueError, match=r"^an odd end$"):
        real(rank, replace(BASE, topology="aer", workers_per_host=2)).run(range(3))


def test_a_stage_that_raises_is_not_waited_for_and_blames_no_peer() -> None:
    run_processes(broken_stage, 4)
