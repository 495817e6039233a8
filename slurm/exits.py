"""How a job ends. The codes are those of common.training.launch, whose import of torch would take seconds."""

FINISHED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 75


class JobError(RuntimeError):
    """The job cannot go on; the message says why, `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
