"""One command that checks the project on the GPUs of a machine; see `__main__.py`."""
