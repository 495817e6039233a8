"""Reading batches ahead in a thread, into pinned memory, so that a GPU does not wait for the disk."""

import queue
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

DEPTH = 3  # batches read ahead


def prefetch(batches: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the batches on `device`; if that is a GPU, they are read ahead and copied asynchronously."""
    if device.type == "cpu":
        yield from batches
        return
    for batch in read_ahead(batches, pin=True):
        yield batch.to(device, non_blocking=True)


def read_ahead(batches: Iterator[Tensor], depth: int = DEPTH, pin: bool = False) -> Iterator[Tensor]:
    """Yield the batches in order, reading up to `depth` of them ahead in a thread.

    An error in the thread is raised in place of its batch. Closing the iterator ends the thread.
    """
    ready: queue.Queue[Tensor | BaseException | None] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: Tensor | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for batch in batches:
                if not put(batch.pin_memory() if pin else batch):
                    return
            put(None)
        except BaseException as error:  # any error: none may vanish with the thread
            put(error)

    thread = threading.Thread(target=read, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
