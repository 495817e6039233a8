"""The time that steps take, told by the device that computes them."""

import time

import torch


class StepClock:
    """Seconds from the end of one step to the end of the next, without what is excluded by `restart`.

    On a GPU, which the host runs ahead of, each moment is an event of the current stream; what lies between two is read
    in `times`. On the CPU a moment is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = []  # begin and end of each
        self._begin = self._now()

    def restart(self) -> None:
        """Begin a step now: what came since the last one ended is not part of any."""
        self._begin = self._now()

    def end_step(self) -> None:
        """End a step, and begin the next."""
        end = self._now()
        self._steps.append((self._begin, end))
        self._begin = end

    def times(self) -> list[float]:
        """Return the seconds of each step that ended since the last call; wait until the device has done them."""
        steps, self._steps = self._steps, []
        return [self._seconds(begin, end) for begin, end in steps]

    def _now(self) -> "torch.cuda.Event | float":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        if not self._on_gpu:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000
