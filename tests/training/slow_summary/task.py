"""The cnn task on a file system that takes two seconds for a summary."""

import time
from typing import Any

from cnn.task import ImageClassification
from common.config.config import Config
from common.record.run_folder import RunFolder

finish = RunFolder.finish


def finish_slowly(folder: RunFolder, summary: dict[str, Any]) -> None:
    (folder.path / "finishing").touch()
    time.sleep(2)
    finish(folder, summary)


class SlowSummary(ImageClassification):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        RunFolder.finish = finish_slowly  # not on import: a launcher imports the task too


TASK = SlowSummary
