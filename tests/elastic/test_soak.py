"""Random workers are killed or stopped and come back, again and again: nothing hangs, leaks, or differs from a replay.

By hand, in some minutes:

    SOAK_WORKERS=8 SOAK_KILLS=50 SOAK_STOPS=20 SOAK_SEED=1 python -m pytest -s tests/elastic/test_soak.py
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.test_processes import assert_equals_replay, train, trained
from tests.training.replay import membership_rows
from tests.waiting import LIMIT_S, Resources, held, wait_for

WORKERS, KILLS, STOPS, SEED = (
    int(os.environ.get(f"SOAK_{name}", default))
    for name, default in {"WORKERS": 4, "KILLS": 2, "STOPS": 1, "SEED": 0}.items()
)
WATCHED = 1  # the worker that stays
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S + 60 * (KILLS + STOPS))]


def worker(number: int) -> int:
    """Return the process of a worker."""
    (process,) = [child for child in multiprocessing.active_children() if child.name == f"rank {number}"]
    return process.pid or 0


def replaced(folder: Path, times: int) -> Callable[[], bool]:
    """Return a function that tells whether workers have joined that many times."""
    return lambda: sum(len(row["joined"]) for row in membership_rows(folder)) == times


def test_random_losses(groups: str, tmp_path: Path) -> None:
    """With 8 workers up to two are lost at a time, the second one perhaps while the others recover from the first."""
    folder, draw = tmp_path / "run", random.Random(SEED)
    arguments = [f"workers.count={WORKERS}", f"training.batch_size={16 * WORKERS}", "training.steps=1000000"]
    arguments += ["optimizer=adamw", "logging.every=20", "evaluation.every=1000000", "training.checkpoint_every=null"]
    signals = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * STOPS
    draw.shuffle(signals)
    used: list[Resources] = []

    def disturb() -> None:
        wait_for(trained(folder, 20))
        used.append(held(worker(WATCHED)))
        lost = 0
        while signals:
            time.sleep(draw.uniform(0, 0.5))
            together = min(len(signals), draw.choice((1, 2)) if WORKERS >= 8 else 1)
            for number in draw.sample([n for n in range(WORKERS) if n != WATCHED], together):
                os.kill(worker(number), signals.pop())
                time.sleep(draw.uniform(0, 0.2))
            lost += together
            wait_for(replaced(folder, lost))
        wait_for(trained(folder, membership_rows(folder)[-1]["step"] + 40))
        used.append(held(worker(WATCHED)))
        os.kill(os.getpid(), signal.SIGTERM)

    run = ["elastic.restarts=1000", "parallel.timeout_s=8", f"elastic.groups={groups}"]
    assert train(folder, disturb, *arguments, *run) == 75
    before, after = used
    print(f"memberships: {len(membership_rows(folder))}, before: {before}, after: {after}")
    assert after.threads <= before.threads
    assert after.files <= before.files + 1  # that of the metrics
    assert after.megabytes < before.megabytes + 30
    assert_equals_replay(folder, *arguments)
