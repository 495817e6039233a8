"""Which keys of a configuration do not change what a run computes."""

import re

# Where a run computes, reads and writes, what it prints, and how many workers it can lose. A run may be resumed with
# other values, and runs with other values count as runs of a table.
BOOKKEEPING = re.compile(
    r"run_dir|resume|name|profile|peak_tflops|logging(\..*)?"
    r"|training\.(threads|device|checkpoint_every|checkpoints_kept)|data\.(folder|path|copy_to|workers)"
    r"|elastic\.(min_workers|restarts|agent|groups)"
)


def is_bookkeeping(key: str) -> bool:
    """Return whether a key, such as training.threads, leaves the results as they are."""
    return BOOKKEEPING.fullmatch(key) is not None
