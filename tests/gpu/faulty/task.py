"""The cnn task, but rank 1 fails in step STEP as the environment says: FAULT=raise, kill or stop."""

import os
import signal
import time
from pathlib import Path

from torch import Tensor, nn

from cnn.data import Images
from cnn.task import ImageClassification

STEP, RANK, FAULT, MARK = 25, "1", "FAULT", "fault"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Faulty(ImageClassification):
    """Image classification that leaves RUN_DIR/fault behind when it fails, with the time."""

    calls = 0

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        """Return the loss, or fail."""
        self.calls += 1
        how = os.environ.get(FAULT)
        if how and self.calls == STEP and os.environ.get("LOCAL_RANK") == RANK:
            Path(self._config.run_dir, MARK).write_text(str(time.time()))
            if how in SIGNALS:
                os.kill(os.getpid(), SIGNALS[how])
            else:
                raise ValueError("this rank fails on purpose")
        return super().loss(model, batch)


TASK = Faulty
