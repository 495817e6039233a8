"""What a process notes of its steps, for another one to read."""

import os
from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """The beginning of a step that counted, in seconds since the epoch; membership: a number that tells them apart."""

    time: float
    world_size: int
    membership: int


class Notes:
    """Lines "<time> <world size> <membership>" in the file <process number> of the folder STEPS_FOLDER."""

    def __init__(self) -> None:
        self._file = (Path(os.environ["STEPS_FOLDER"]) / str(os.getpid())).open("a", buffering=1)

    def write(self, note: Note) -> None:
        """Add a line."""
        self._file.write(f"{note.time:.6f} {note.world_size} {note.membership}\n")


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Return the complete notes of each process, by its number."""
    notes = {}
    for file in folder.iterdir():
        lines = file.read_text().rpartition("\n")[0].splitlines()
        notes[int(file.name)] = [Note(float(t), int(size), int(members)) for t, size, members in map(str.split, lines)]
    return notes
