"""The cnn task on a file system that takes two seconds for a summary."""

import time

from cnn.task import ImageClassification
from common.record.run_folder import RunFolder

finish = RunFolder.finish
RunFolder.finish = lambda *arguments: (time.sleep(2), finish(*arguments))
TASK = ImageClassification
