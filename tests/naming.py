"""Names for the cases of a loop, so that a failure tells which of them it is."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*names: object) -> Iterator[None]:
    """Add `names` to any error raised inside: for tests that go through many cases, each too small for its own test."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {' '.join(map(str, names))}")
        raise
