"""Running many small jobs on a few processes with a progress bar, in bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from tqdm import tqdm

Result = TypeVar("Result")


def results(
    function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]], jobs: int, title: str
) -> Iterator[Result]:
    """Yield function(*a) for each a of `arguments`, in order; in this process if jobs is 1.

    The first error is raised, and no further job is started.
    """
    with tqdm(desc=title, unit="chunk", disable=None) as progress:
        if jobs == 1:
            for each in arguments:
                yield function(*each)
                progress.update()
            return
        with ProcessPoolExecutor(jobs) as pool:
            pending: deque[Future[Result]] = deque()
            for each in arguments:
                pending.append(pool.submit(function, *each))
                if len(pending) > 2 * jobs:
                    yield pending.popleft().result()
                    progress.update()
            while pending:
                yield pending.popleft().result()
                progress.update()


def run(function: Callable[..., None], arguments: Iterable[tuple[Any, ...]], jobs: int, title: str) -> None:
    """Do the same for a function that returns nothing."""
    for _ in results(function, arguments, jobs, title):
        pass
