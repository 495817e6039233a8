"""Slurm jobs."""
