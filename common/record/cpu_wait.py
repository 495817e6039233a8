"""How long the threads of this process were ready to run and had to wait for a core."""

from pathlib import Path

TASKS = Path("/proc/self/task")


def cpu_wait_s() -> float:
    """Return the seconds that its threads have waited so far, added up; 0 where the system is not Linux."""
    waited = 0
    for task in TASKS.glob("*/schedstat"):
        try:
            waited += int(task.read_text().split()[1])  # ns
        except (OSError, IndexError):  # the thread has ended
            continue
    return waited / 1e9
