"""The cnn task, but rank 1 fails where FAULTS says under the run's name, and nowhere in a run of another name.

Process groups of the runs "raises" and "hangs" do not close, as NCCL's after an error.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cnn.task import ImageClassification
from common.config.config import Config
from common.training.recorder import Recorder


def stop() -> None:
    """As by a debugger or a failing node."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(3600)


def linger() -> None:
    time.sleep(3)


def hear() -> None:
    signal.raise_signal(signal.SIGTERM)


def fail() -> None:
    raise ValueError("this rank is broken")


MARK = "fault"  # the file in the run's folder that says when the rank failed
FAULTS: dict[str, tuple[Callable[[], None], type, str, int]] = {  # what happens, in which call of which method
    "raises": (fail, ImageClassification, "loss", 5),
    "hangs": (hang, ImageClassification, "loss", 5),
    "validation": (stop, ImageClassification, "evaluate", 1),
    "lingers": (linger, ImageClassification, "evaluate", 1),
    "hears": (hear, ImageClassification, "evaluate", 1),
    "end": (stop, Recorder, "finish", 1),
    "raise": (fail, ImageClassification, "loss", 25),
    "kill": (die, ImageClassification, "loss", 25),
    "stop": (stop, ImageClassification, "loss", 25),
}


class Faulty(ImageClassification):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.name in ("raises", "hangs"):
            dist.destroy_process_group = lambda *_: hang()
        if os.environ.get("LOCAL_RANK") != "1":
            return
        if config.name == "data":
            time.sleep(3)  # after the first heartbeat
            stop()
        elif config.name in FAULTS:
            action, owner, method, call = FAULTS[config.name]
            mark = Path(config.run_dir, MARK)
            setattr(owner, method, failing(getattr(owner, method), action, call, mark))


def failing(method: Callable[..., Any], action: Callable[[], None], call: int, mark: Path) -> Callable[..., Any]:
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            mark.write_text(str(time.time()))
            action()
        return method(*arguments, **named)

    return counted


TASK = Faulty
