"""The lock of a run folder: RUN_DIR/.lock names the process that trains in it, so that no second one does.

It relies on exclusive creation of files, which shared file systems support too, and not on their locks. A process that
is gone loses its lock: on the same host it is looked up; on another host it is gone if its file, which it touches
every few seconds, does not change for a minute. Only one process can follow it: the one that creates the file named
after the lost holder, and then renames it to .lock. If that file was created after an outdated look at .lock, the
process can tell: .lock no longer names that holder.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.atomic import write_atomically
from common.config.config import ConfigError
from common.record.environment import now

BEAT_S = 5.0
SILENCE_S = 60.0
LOOK_S = 0.5


class Holder(NamedTuple):
    """The holder of a lock, as its file names it.

    id:    of this acquisition of the lock, never used again
    start: of the run to which the process belongs; processes of one start may take the lock from each other
    place: where `pid` has a meaning; "" if it is not known
    began: start time of the process, because a pid may be reused
    """

    id: str
    start: str
    host: str
    place: str
    pid: int
    began: str | None
    since: str


UNREADABLE = Holder("unreadable", "", "an unknown host", "", 0, None, "an unknown time")


class RunLock:
    """A process's hold on a run folder. start: see Holder."""

    def __init__(self, folder: Path, start: str) -> None:
        self.start, self._folder, self._file = start, folder, folder / ".lock"
        pid = os.getpid()
        self._mine = Holder(uuid.uuid4().hex, start, socket.gethostname(), _place(), pid, _start_time(pid), now())
        self._made: list[Path] = []
        self._other: Holder | None = None
        self._over, self._looking = threading.Event(), threading.Lock()
        self._sign = time.time()  # of the last sign of life; time.monotonic() stands still in a suspended machine
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Make the folder and take its lock.

        Raises ConfigError if the folder cannot be written, or, with its name, if another process holds the lock.
        """
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._follow():
                pass
        except (ConfigError, OSError) as error:
            self._remove_folders()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"run_dir={self._folder}: cannot be written ({error.strerror})") from error
        self._sign = time.time()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RuntimeError if another process has taken the lock because this one was silent for too long."""
        if self._other is None and time.time() - self._sign > SILENCE_S:
            self._look()
        if self._other is not None:
            raise RuntimeError(f"run_dir={self._folder}: {_describe(self._other)} has taken it over, so this one ends")

    def release(self) -> None:
        """Give the lock back if this process has it; remove the folders that `take` made if they are still empty."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(BEAT_S)  # which may be about to create the file again
        with suppress(OSError):
            holder = _read(self._file)
            if holder is not None and holder.id == self._mine.id:
                self._file.unlink()
        self._remove_folders()

    def _remove_folders(self) -> None:
        with suppress(OSError):  # one of them is not empty
            for folder in self._made:
                folder.rmdir()

    def _follow(self) -> bool:
        """Become the holder; return False if others were faster. Raises ConfigError if the present holder is alive."""
        gone: list[Holder] = []
        file = self._file
        while not _create(file, self._mine):
            holder = _read(file)
            if holder is None:  # released meanwhile
                return False
            here = holder.place != "" and holder.place == self._mine.place
            if not (here and _is_gone(holder)):
                if holder.start == self._mine.start:
                    write_atomically(file, _content(self._mine))
                    break
                if here or self._is_alive(file, holder):
                    raise ConfigError(
                        f"run_dir={self._folder}: {_describe(holder)} trains in it; expected one run at a time: wait "
                        "for its end, after which resume=true goes on, or take another run_dir"
                    )
            gone.append(holder)
            file = self._after(holder)
        if gone:
            first = _read(self._file)
            if first is None or first.id != gone[0].id:
                file.unlink(missing_ok=True)
                return False
            file.replace(self._file)
            for holder in gone[:-1]:  # which were about to follow when they died
                self._after(holder).unlink(missing_ok=True)
        return True

    def _after(self, holder: Holder) -> Path:
        return self._file.with_name(f".lock.after_{holder.id}")

    def _is_alive(self, file: Path, holder: Holder) -> bool:
        """Wait for a sign of a holder on another host; return whether there was one."""
        who = f"run_dir={self._folder}: {_describe(holder)}"
        print(f"{who} may be training in it: waiting {SILENCE_S:g} s for a sign of life", file=sys.stderr, flush=True)
        seen, give_up = _signs(file), time.monotonic() + SILENCE_S
        while time.monotonic() < give_up:
            time.sleep(LOOK_S)
            signs = _signs(file)
            if signs != seen:
                return signs is not None
        return False

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S) and self._other is None:
            with suppress(OSError):  # the file system may be back for the next beat
                self._look()

    def _look(self) -> None:
        """Give a sign of life, or notice that the lock is lost."""
        with self._looking:
            looked, holder = time.time(), _read(self._file)
            if holder is None and time.time() - self._sign > SILENCE_S:  # others may have taken it and gone
                holder = UNREADABLE
            if holder is None:  # a user removed it
                _create(self._file, self._mine)
            elif holder.id != self._mine.id:
                self._other = holder
            else:
                os.utime(self._file)
            self._sign = looked


def _content(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode() + b"\n"


def _create(file: Path, holder: Holder) -> bool:
    """Create the file; return False if it exists."""
    try:
        stream = file.open("xb", buffering=0)
    except FileExistsError:
        return False
    try:
        with stream:
            stream.write(_content(holder))
    except OSError:  # on a full disk: an empty file would name no process
        file.unlink()
        raise
    return True


def _read(file: Path) -> Holder | None:
    """Return the holder that the file names; None without a file."""
    for _ in range(10):
        try:
            return Holder(**json.loads(file.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            time.sleep(0.05)  # it is being written
    return UNREADABLE


def _signs(file: Path) -> tuple[int, bytes] | None:
    """Return what changes at a beat; None without a file. It is opened because that makes NFS ask the server."""
    try:
        with file.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns, stream.read()
    except FileNotFoundError:
        return None


def _describe(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host} (since {holder.since})"


def _place() -> str:
    """Return the boot id and the namespace of process ids; "" unless both are known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_gone(holder: Holder) -> bool:
    """Return whether a process of this place has ended."""
    began = _start_time(holder.pid)
    try:
        os.kill(holder.pid, 0)
    except PermissionError:  # another user's, which /proc may hide
        return began not in (None, holder.began)
    except ProcessLookupError:
        return True
    return began != holder.began


def _start_time(pid: int) -> str | None:
    """Return the start time, in ticks, of a process of this place; None if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
