"""The configuration of a run: typed, checked, and free of torch."""
