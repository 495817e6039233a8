"""What a run leaves: its folder, metrics, checkpoints, environment and exit code."""
