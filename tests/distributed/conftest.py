"""One thread, as in the processes: sums then have one order, and results can be equal bit for bit."""

from tests.threads import one_thread  # noqa: F401
