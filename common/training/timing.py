"""Where the time of a run goes: its steps, and the trace of a few steps."""

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED, WARMUP, RECORDED = 10, 2, 4  # steps of a trace, counted from the start


class StepClock:
    """Seconds from the end of one step to the end of the next, without the time that `restart` excludes.

    The host runs ahead of a GPU, so there each moment is an event of the current stream, and `times` reads the time
    between two events. On the CPU a moment is the host's clock.
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
        """Return the seconds of each step that ended since the last call; wait until the device has finished them."""
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


class Trace(AbstractContextManager["Trace"]):
    """A trace of steps 13 to 16 of a start in RUN_DIR/trace/rank_<rank>.json; does nothing unless `enabled`.

    Ranges: data, forward, backward, optimizer, and inside it gossip::merge and gossip::launch. A message (`gloo:send`,
    `gloo:recv`, `nccl:...`) lasts from its launch until the merge has found it complete.
    """

    def __init__(self, run_dir: str, rank: int, enabled: bool) -> None:
        self._profiler: profile | AbstractContextManager = nullcontext()
        self._file, self._steps = Path(run_dir) / "trace" / f"rank_{rank}.json", 0
        self._speaks = enabled and rank == 0
        if enabled:
            self._file.parent.mkdir(exist_ok=True)
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *gpu],
                schedule=schedule(skip_first=SKIPPED, wait=0, warmup=WARMUP, active=RECORDED, repeat=1),
                on_trace_ready=lambda done: done.export_chrome_trace(str(self._file)),
            )

    def __enter__(self) -> "Trace":
        """Start the profiler."""
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the profiler and write what it has recorded."""
        self._profiler.__exit__(*error)
        if self._speaks:
            first = SKIPPED + WARMUP + 1
            missing = f"profile=true: no trace: recording begins at step {first} after each start, not reached here"
            print(f"trace: {self._file}" if self._steps >= first else missing, file=sys.stderr, flush=True)

    def step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        if isinstance(self._profiler, profile):
            self._profiler.step()
