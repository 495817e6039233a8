"""A task one of whose ranks fails."""
