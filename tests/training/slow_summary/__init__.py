"""A task whose summaries take long to write."""
