"""The cnn task, but every process notes when each of its steps begins and among how many ranks.

A membership is known by how often this process has opened the data: each one opens them anew.
"""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from cnn.data import Images
from cnn.task import ImageClassification
from common.parallel.collectives import world_size


class Note(NamedTuple):
    """The beginning of a step that counted, in seconds since the epoch; membership: a number that tells them apart."""

    time: float
    world_size: int
    membership: int


def write_note(note: Note) -> None:
    """Add a line "<time> <world size> <membership>" to the file <process number> of the folder STEPS_FOLDER."""
    with (Path(os.environ["STEPS_FOLDER"]) / str(os.getpid())).open("a") as file:
        file.write(f"{note.time:.6f} {note.world_size} {note.membership}\n")


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Return the complete notes of each process, by its number."""
    notes = {}
    for file in folder.iterdir():
        lines = file.read_text().rpartition("\n")[0].splitlines()
        notes[int(file.name)] = [Note(float(t), int(size), int(members)) for t, size, members in map(str.split, lines)]
    return notes


class Timed(ImageClassification):
    """Image classification with notes."""

    opened = 0  # how often

    def train_data(self, *arguments: Any) -> Any:
        """Count how often data are opened."""
        self.opened += 1
        return super().train_data(*arguments)

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Note the time, return the loss; called once in a step."""
        if model.training:
            write_note(Note(time.time(), world_size(), self.opened))
        return super().loss(model, batch)


TASK = Timed
