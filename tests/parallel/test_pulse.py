"""Signs of life: who is silent is found, who has not begun or has ended is not."""

import queue
import time

import pytest
import torch.distributed as dist

from common.parallel.pulse import OVER, Pulse


def test_a_rank_that_falls_silent_is_found() -> None:
    store, said = dist.HashStore(), queue.SimpleQueue()
    dist.PrefixStore("pulse", store).set("1", "7")
    pulse = Pulse(lambda: (store, 0, 2), 0.2, said.put)
    assert said.get(timeout=60).startswith("rank 0: rank 1 has had no heartbeat for 0.2 s")
    pulse.close()


@pytest.mark.parametrize("sign", [None, OVER], ids=["not begun", "ended"])
def test_a_rank_that_has_not_begun_or_has_ended_is_not_missed(sign: bytes | None) -> None:
    store, said = dist.HashStore(), queue.SimpleQueue()
    signs = dist.PrefixStore("pulse", store)
    if sign is not None:
        signs.set("1", sign)
    pulse = Pulse(lambda: (store, 0, 2), 0.2, said.put)
    time.sleep(0.6)
    pulse.close()
    assert said.empty()
    assert signs.get("0") == OVER
