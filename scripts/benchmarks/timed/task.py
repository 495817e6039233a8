"""The cnn task, but every process notes when each of its steps begins and among how many ranks.

The notes of a process are lines "<seconds since the epoch> <world size> <data sets opened>" in the file <pid> of the
folder STEPS_FOLDER. Data sets are opened anew by each membership.
"""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cnn.data import Images
from cnn.task import ImageClassification
from common.parallel.collectives import world_size
from common.training.config import Config


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
            if self._notes is None:
                self._notes = (Path(os.environ["STEPS_FOLDER"]) / str(os.getpid())).open("a", buffering=1)
            self._notes.write(f"{time.time():.6f} {world_size()} {self._opened}\n")
        return super().loss(model, batch)


TASK = Timed
