"""Named spans in a profiler's trace."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def region(name: str) -> AbstractContextManager[object]:
    """`torch.profiler.record_function`, which costs 10 us even without a profiler: then this costs nothing."""
    return record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()
