"""From a command line to a run: composition, processes, multi-runs."""
