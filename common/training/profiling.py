"""The trace of a few steps, for chrome://tracing or ui.perfetto.dev."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED, WARMUP, RECORDED = 10, 2, 4  # steps of this start of the run


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
            missing = f"profile=true: no trace: it begins with step {first} of a start, which this one did not reach"
            print(f"trace: {self._file}" if self._steps >= first else missing, file=sys.stderr, flush=True)

    def step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        if isinstance(self._profiler, profile):
            self._profiler.step()
