"""The cnn task, but every process notes when each of its steps begins and among how many ranks.

A membership is known by how often this process has opened the data: each one opens them anew.
"""

import time
from typing import Any

from torch import Tensor, nn

from cnn.data import Images
from cnn.task import ImageClassification
from common.parallel.collectives import world_size
from common.training.config import Config
from scripts.benchmarks.timed.notes import Note, Notes


class Timed(ImageClassification):
    """Image classification with notes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._notes, self._opened = None, 0

    def train_data(self, *arguments: Any) -> Any:
        """Count how often data are opened."""
        self._opened += 1
        return super().train_data(*arguments)

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Note the time, return the loss; called once in a step."""
        if model.training:
            self._notes = self._notes or Notes()
            self._notes.write(Note(time.time(), world_size(), self._opened))
        return super().loss(model, batch)


TASK = Timed
