"""What a check is given and what it answers."""

import os
from dataclasses import dataclass

import torch

CPU_RANKS = 4  # processes that the checks start where there are no GPUs
SHARING_RANKS = 4  # processes that share the only GPU


class FailedError(Exception):
    """What the check looks at is wrong; the message says what was found and what was expected."""


class SkippedError(Exception):
    """The check cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Machine:
    """Where checks run.

    device: "cuda", or "cpu" for the checks' own tests: the same logic at small sizes, with gloo
    gpus:   number of GPUs, 0 on CPUs
    quick:  leave out what takes minutes
    log:    file for the output of ranks; None: that of the process that starts them
    """

    device: str
    gpus: int = 0
    quick: bool = False
    log: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the checks run on GPUs."""
        return self.device == "cuda"

    @property
    def shares_gpu(self) -> bool:
        """Whether several ranks have to share the only GPU."""
        return self.on_gpu and self.gpus == 1

    @property
    def ranks(self) -> int:
        """The most ranks that a check may start."""
        return CPU_RANKS if not self.on_gpu else SHARING_RANKS if self.shares_gpu else self.gpus

    def require_gpus(self, count: int) -> None:
        """Raise SkippedError if there are fewer GPUs; CPUs always do."""
        if self.on_gpu and self.gpus < count:
            raise SkippedError(f"needs {count} GPUs, found {self.gpus}")

    def settle(self) -> None:
        """Wait until the GPU, if there is one, has done its work."""
        if self.on_gpu:
            torch.cuda.synchronize()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
