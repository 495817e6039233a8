"""How a job ends."""

from common.record import BAD_CONFIGURATION, FAILED, FINISHED, INTERRUPTED

__all__ = ["BAD_CONFIGURATION", "FAILED", "FINISHED", "INTERRUPTED", "JobError"]


class JobError(RuntimeError):
    """The job cannot go on; the message says why, `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
