"""Experiments as tables: rows, sweeps, the runs that they need and the commands that make them, and frames of results.

Nothing here imports scipy, matplotlib or `common.report`, which shows the results; this file imports nothing at all.
"""
