"""The cnn task, but rank 1 is stopped where the run's name says, as by a debugger or a failing node."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from cnn.task import ImageClassification
from common.config.config import Config
from common.record import checkpoint
from common.training.recorder import Recorder

STOPS = {
    "model": (ImageClassification, "build_model"),
    "first_batch": (ImageClassification, "loss"),
    "validation": (ImageClassification, "evaluate"),
    "checkpoint": (checkpoint, "write_atomically"),
    "end": (Recorder, "finish"),
}


class Stopped(ImageClassification):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if os.environ["RANK"] == "1":
            if config.name == "data":
                time.sleep(3)  # after the first heartbeat
                stop()
            owner, name = STOPS[config.name]
            setattr(owner, name, stopping(getattr(owner, name)))


def stopping(function: Callable[..., Any]) -> Callable[..., Any]:
    def first_stops(*arguments: Any, **named: Any) -> Any:
        stop()
        return function(*arguments, **named)

    return first_stops


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


TASK = Stopped
