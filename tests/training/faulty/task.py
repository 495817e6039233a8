"""The cnn task, but rank 1 raises in its fifth step, and process groups do not close, as NCCL's after an error.

A run whose name is "hangs" hangs there instead.
"""

import os
import time

import torch.distributed as dist
from torch import Tensor, nn

from cnn.data import Images
from cnn.task import ImageClassification
from common.config.config import Config


class Faulty(ImageClassification):
    steps = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        dist.destroy_process_group = lambda *_: time.sleep(3600)

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        self.steps += 1
        if self.steps == 5 and os.environ.get("RANK") == "1":
            if self._config.name == "hangs":
                time.sleep(3600)
            raise ValueError("this rank is broken")
        return super().loss(model, batch)


TASK = Faulty
