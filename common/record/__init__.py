"""What a run leaves: its folder, metrics, checkpoints, environment and exit code."""

FINISHED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 75  # exit codes of a run's processes and jobs
