"""The cnn task on a file system that takes two seconds for a summary."""

import time
from typing import Any

from cnn.task import ImageClassification
from common.record.run_folder import RunFolder

finish = RunFolder.finish


def finish_slowly(folder: RunFolder, summary: dict[str, Any]) -> None:
    (folder.path / "finishing").touch()
    time.sleep(2)
    finish(folder, summary)


RunFolder.finish = finish_slowly
TASK = ImageClassification
