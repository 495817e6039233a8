"""The cnn task; the fused update runs as it is written, which each process would else compile."""

from cnn.task import ImageClassification
from common.config.config import Config
from common.optim import compiled


class Uncompiled(ImageClassification):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        compiled.fused_kernel = compiled.written_kernel  # not on import: a launcher imports the task too


TASK = Uncompiled
