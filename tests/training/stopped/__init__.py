"""A task one of whose ranks is stopped."""
