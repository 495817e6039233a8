"""Copies to a device that the host does not wait for, and batches that are made ahead of the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

AHEAD = 3  # items made while the device computes

Item = TypeVar("Item")
Made = TypeVar("Made")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`. A GPU copies from pinned memory when it gets there; the host does not wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def map_ahead(function: Callable[[Item], Made], items: Iterable[Item], device: torch.device) -> Iterator[Made]:
    """Return `map(function, items)`; for a GPU, a thread works a few items ahead, so that the GPU does not wait.

    An error in the thread is raised in place of its item. Closing the iterator ends the thread.
    """
    return map(function, items) if device.type == "cpu" else _in_thread(function, items)


def _in_thread(function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        pending: deque[Future[Made]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
