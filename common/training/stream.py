"""The training batches and random numbers of one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch

from common.training.task import Batch, TrainData


class RandomState:
    """A separate stream of torch's random numbers, independent of others in the process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device, self._gpus = device, [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._gpus):
            torch.manual_seed(seed)
            self.state = self._read()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with torch.random.fork_rng(self._gpus):
            self._write(self.state)
            yield
            self.state = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if self._gpus else None

    def _write(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0].cpu())
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1].cpu(), self._device)


class Dealing(NamedTuple):
    """The point at which the batches of an epoch are dealt anew because the number of ranks has changed.

    offset: batches of this epoch, of all ranks, that were dealt before
    drawn:  batches that each stream had taken by then
    epochs: epochs seen by then
    size:   size of the local batches that `offset` counts; 0: any size
    """

    epoch: int = 0
    offset: int = 0
    drawn: int = 0
    epochs: float = 0.0
    size: int = 0

    def in_batches_of(self, size: int) -> "Dealing":
        """Return the same point in batches of another size, rounded up past what was dealt unless the sizes divide."""
        return self._replace(offset=-(-self.offset * (self.size or size) // size), size=size)


BEGINNING = Dealing()


class Stream:
    """One rank's endless training batches, epoch after epoch, and its random numbers.

    rank:    the real or simulated rank for which it draws
    ranks:   how many there are
    dealing: where it begins
    drawn:   number of batches taken, which together with seed and dealing determines the position in the data
    number:  of the rank when the run began, which seeds its random numbers; `rank` unless workers left or joined
    """

    def __init__(
        self,
        data: TrainData,
        seed: int,
        rank: int,
        device: torch.device,
        ranks: int = 1,
        dealing: Dealing = BEGINNING,
        number: int | None = None,
    ) -> None:
        self.data, self.rank, self._ranks = data, rank, ranks
        self._dealing = dealing.in_batches_of(data.batch_size)
        # Ranks draw different numbers (dropout, augmentation), the same in processes and in a simulation.
        self._seed, self._device = seed * 1_000_003 + (rank if number is None else number), device
        self.random = RandomState(self._seed, device)
        self.drawn = dealing.drawn
        self._batches: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch; draw its augmentations inside `random.active()`."""
        epoch, start, offset = self._position()
        if start == 0:
            self._batches = self.data.epoch(epoch, 0, offset)
        self.drawn += 1
        return next(self._batches)

    def _position(self) -> tuple[int, int, int]:
        """Return epoch, batches taken of it, and the offset from which these were dealt."""
        began, taken = self._dealing, self.drawn - self._dealing.drawn
        rest = max(0, self.data.batches_per_epoch - began.offset) // self._ranks if began.offset else 0
        if began.offset and taken < rest:
            return began.epoch, taken, began.offset
        epochs, start = divmod(taken - rest, self.data.steps_per_epoch)
        return began.epoch + (1 if began.offset else 0) + epochs, start, 0

    def rest(self) -> Dealing:
        """Return the point from which the rest of this epoch is dealt to another number of ranks."""
        epoch, start, offset = self._position()
        return Dealing(epoch, offset + start * self._ranks, self.drawn, self.epochs, self.data.batch_size)

    def lookahead(self) -> "Stream":
        """Return a stream of the batches and random numbers that come next here, without advancing this one."""
        ahead = copy(self)
        ahead.random = copy(self.random)
        ahead._begin()
        return ahead

    def draw_anew(self) -> None:
        """Restart the random numbers from their seed."""
        self.random = RandomState(self._seed, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the state of the random numbers."""
        return {"drawn": self.drawn, "dealing": tuple(self._dealing), "random": self.random.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.drawn, self.random.state = state["drawn"], state["random"]
        self._dealing = Dealing(*state["dealing"]).in_batches_of(self.data.batch_size)
        self._begin()

    def _begin(self) -> None:
        """Read the data from the current position on."""
        epoch, start, offset = self._position()
        self._batches = self.data.epoch(epoch, start, offset) if start else iter(())

    @property
    def epochs(self) -> float:
        """Epochs seen so far."""
        return self._dealing.epochs + (self.drawn - self._dealing.drawn) / self.data.steps_per_epoch
