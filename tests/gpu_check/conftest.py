"""One thread, as in the checks' processes: sums have one order."""

from tests.threads import one_thread  # noqa: F401
