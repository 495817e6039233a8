"""Items that are made ahead of a GPU: the same ones, errors in their place, no thread left behind."""

import threading

import pytest
import torch

from common.transfer import map_ahead

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # a device's name only; no GPU is needed


def made(number: int) -> int:
    if number == 7:
        raise RuntimeError("the disk is broken")
    return 10 * number


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_same_items_in_the_same_order_and_errors_in_their_place(device: torch.device) -> None:
    assert list(map_ahead(made, range(7), device)) == [10 * i for i in range(7)]
    items = map_ahead(made, range(9), device)
    assert [next(items) for _ in range(7)] == [10 * i for i in range(7)]
    with pytest.raises(RuntimeError, match="the disk is broken"):
        next(items)
    assert not threads()


@pytest.mark.parametrize(("device", "ahead"), [(CPU, 1), (GPU, 3)])
def test_a_few_items_are_asked_for_ahead_of_a_gpu(device: torch.device, ahead: int) -> None:
    asked = []
    items = map_ahead(lambda number: asked.append(number), range(20), device)
    next(items)
    del items  # which ends the thread
    assert asked == list(range(ahead))
    assert not threads()
