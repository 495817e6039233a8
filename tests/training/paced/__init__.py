"""A task whose steps take a while."""
