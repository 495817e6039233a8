"""A task one of whose ranks fails, for check 10."""
