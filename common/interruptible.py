"""Processes that a command starts, the signals that end its work, and which processes receive them."""

import contextlib
import functools
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, TypeVar

from common.training.signals import SIGNALS

DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)
GRACE_S = 2.0  # for processes to finish what they have begun
LONGEST = 70  # bytes of TMPDIR: a socket's whole path has at most 107 on Linux, and multiprocessing adds up to 32

Result = TypeVar("Result")


class KilledError(RuntimeError):
    """Raised if a process that did part of the work was killed. key: the argument that sets how many there are."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key}: one of the processes was killed, probably for lack of memory; start the same command again, with "
            f"{key}=N for fewer of them"
        )


def interruptible(function: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorate a command's main: a signal ends it with one line and exit code 128 + its number, a KilledError with 1.

    Further signals are ignored, so that what is done is saved and no temporary file stays.
    """

    @functools.wraps(function)
    def main(argv: Sequence[str]) -> int:
        came = [signal.SIGINT]

        def first(number: int, frame: object) -> None:
            for other in former:
                signal.signal(other, signal.SIG_IGN)
            came[:] = [number]
            raise KeyboardInterrupt

        # Some signals may be ignored already: Ctrl-C in the background of a script, SIGHUP under nohup.
        here = threading.current_thread() is threading.main_thread()
        heard = [number for number in SIGNALS if here and signal.getsignal(number) in DEFAULTS]
        former = {number: signal.signal(number, first) for number in heard}
        try:
            return function(argv)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + came[0]
        except KilledError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            for number, handler in former.items():
                if signal.getsignal(number) is first:  # else a signal has come, and the program is about to end
                    signal.signal(number, handler)

    return main


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Hold signals back; processes started inside the block never get them, so that their parent decides what they
    mean: a terminal sends Ctrl-C to all processes, Slurm every signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by fork and exec
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def heard_alone() -> Iterator[None]:
    """Keep signals from processes that this thread starts in the block, such as a compiler; this process gets them."""
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()  # the system gives it the signals that this thread blocks
    try:
        with unheard():
            yield
    finally:
        over.set()


def shorten_socket_paths() -> None:
    """Let multiprocessing keep its sockets in /tmp where TMPDIR is too long for them. Call it before its first one."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        chosen, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # made once, and used from then on
        finally:
            tempfile.tempdir = chosen


def server_context(preload: list[str]) -> multiprocessing.context.BaseContext:
    """Return a context that starts processes from a small server, which has no threads and has loaded `preload`."""
    shorten_socket_paths()
    with unheard():
        resource_tracker.ensure_running()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    return context


def in_processes(
    function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]], processes: int, ahead: int, key: str
) -> Iterator[Result]:
    """Yield function(*a) for each a of `arguments`, in order; at most `ahead` results wait to be collected.

    key: the argument of the command that sets the number of processes

    If it ends early (an error, a signal, a closed iterator), nothing more is started, and processes that take longer
    than GRACE_S are killed. Raises KilledError if a process is killed.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes)
    waiting: deque[Future[Result]] = deque()
    try:
        for each in arguments:
            with unheard():  # the first submissions start processes
                waiting.append(pool.submit(function, *each))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BaseException as error:
        # In a thread, since it waits for the pool's own thread, which must have ended before the program does.
        ending = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
        ending.start()
        end = time.monotonic() + GRACE_S
        for process in set(multiprocessing.active_children()) - others:
            if not wait([process.sentinel], max(0.0, end - time.monotonic())):
                process.kill()
        ending.join()
        if isinstance(error, BrokenProcessPool):
            raise KilledError(key) from error
        raise
    finally:
        pool.shutdown()
