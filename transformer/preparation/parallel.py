"""Running many small jobs on a few processes with a progress bar, in bounded memory."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

from common.interruptible import in_processes

Result = TypeVar("Result")


def results(
    function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]], jobs: int, title: str
) -> Iterator[Result]:
    """Yield function(*a) for each a of `arguments`, in order; in this process if jobs is 1.

    The first error is raised, KilledError if a process is killed, and no further job is started.
    """
    with tqdm(desc=title, unit="chunk", disable=None) as progress:
        if jobs == 1:
            for each in arguments:
                yield function(*each)
                progress.update()
            return
        for result in in_processes(function, arguments, jobs, 2 * jobs, "jobs"):
            yield result
            progress.update()


def run(function: Callable[..., None], arguments: Iterable[tuple[Any, ...]], jobs: int, title: str) -> None:
    """Do the same for a function that returns nothing."""
    with contextlib.closing(results(function, arguments, jobs, title)) as done:
        for _ in done:
            pass
