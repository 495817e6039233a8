"""What is run: tables with their rows and sweeps, the commands that make their runs, and these as pandas frames.

Nothing is imported here, and nothing here imports scipy, matplotlib or `common.report`, which shows results.
"""
