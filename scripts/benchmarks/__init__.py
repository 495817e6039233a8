"""Benchmarks: one module each, run as `python -m scripts.benchmarks.<name>`."""
