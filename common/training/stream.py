"""The training batches and random numbers of one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common.training.task import Batch, TrainData


class RandomState:
    """A separate stream of torch's random numbers, independent of others in the process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        with self._global_restored():
            torch.manual_seed(seed)
            self.state = self._read()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with self._global_restored():
            self._write(self.state)
            yield
            self.state = self._read()

    @contextmanager
    def _global_restored(self) -> Iterator[None]:
        before = self._read()
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_gpu = self._device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_gpu else None

    def _write(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0].cpu())
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1].cpu(), self._device)


class Stream:
    """One rank's training batches without end, epoch after epoch, and its random numbers.

    rank:  the real or simulated rank for which it draws
    drawn: number of batches taken, which together with the seed determines the position in the data
    """

    def __init__(self, data: TrainData, seed: int, rank: int, device: torch.device) -> None:
        self.data, self.rank = data, rank
        # Ranks draw different numbers (dropout, augmentation), alike in processes and in a simulation.
        self.random = RandomState(seed * 1_000_003 + rank, device)
        self.drawn = 0
        self._batches: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch; draw its augmentations inside `random.active()`."""
        epoch, position = divmod(self.drawn, self.data.steps_per_epoch)
        if position == 0:
            self._batches = self.data.epoch(epoch)
        self.drawn += 1
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the state of the random numbers."""
        return {"drawn": self.drawn, "random": self.random.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.drawn, self.random.state = state["drawn"], state["random"]
        epoch, position = divmod(self.drawn, self.data.steps_per_epoch)
        self._batches = self.data.epoch(epoch, position) if position else iter(())

    @property
    def epochs(self) -> float:
        """Epochs seen so far."""
        return self.drawn / self.data.steps_per_epoch
