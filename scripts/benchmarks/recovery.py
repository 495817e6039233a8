"""Measure how long training stands still when a worker is killed, and how much of the time is lost in all.

python -m scripts.benchmarks.recovery [workers=4] [kills=10] [every_s=60]

elastic: gossip that goes on without the dead worker, which is replaced (elastic.min_workers, elastic.restarts)
restart: what one does without it: the run ends, and the same command continues from its last checkpoint
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, command_of, main_function, parse
from common.report.benchmark import Benchmark

MODULE = "scripts.benchmarks.recovery"
COLUMNS = {
    "how": "elastic: the others go on, a new worker joins; restart: the run is started again, from its checkpoint",
    "workers": "processes",
    "kills": "one random worker each time",
    "step_ms": "of a step while all train: median over steps, highest over processes",
    "survivors_s": "from the kill until every survivor has completed a step in the next membership, which may have a "
    "new worker already: median over kills",
    "survivors_worst_s": "the longest",
    "all_s": "from the kill until as many workers as before have completed a step: median over kills",
    "all_worst_s": "the longest",
    "goodput": "steps of workers that counted, times step_ms, over workers and the time that passed",
}
FORMATS = {"step_ms": ".1f", "survivors_s": ".3f", "survivors_worst_s": ".3f", "goodput": ".3f"}
RUN = ["task=scripts.benchmarks.timed", "model.width=4", "training.threads=1", "training.steps=1000000"]
RUN += ["schedule=constant", "evaluation.every=1000000", "logging.every=10", "logging.progress=false"]
ELASTIC = ["elastic.min_workers=1", "training.checkpoint_every=null"]
PATIENCE_S, CALM_STEPS = 120.0, 20
Found = TypeVar("Found")


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.recovery."""

    workers: PositiveInt = Field(4, ge=3, description="processes on this machine")
    kills: PositiveInt = Field(10, description="of each way to recover")
    every_s: PositiveFloat = Field(60, description="seconds from one kill to the next")
    checkpoint_every: PositiveInt = Field(100, description="steps between the checkpoints to restart from")
    topology: Text = Field("ring", description="of the workers")
    seed: int = Field(0, description="of who is killed, and when")
    output: Text = Field("results/benchmarks", description="where the table is written, as .csv and .md")


class Note(NamedTuple):
    """The beginning of a step; opened: tells memberships apart."""

    time: float
    world_size: int
    opened: int


@main_function
def main(argv: Sequence[str]) -> int:
    """Kill workers both ways, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Measure recovery from the death of workers.")
    benchmark = Benchmark("recovery", "Recovery from the death of a worker", COLUMNS, FORMATS)
    rows = []
    for how, measure in (("elastic", elastic), ("restart", restart)):
        rows.append({"how": how, "workers": arguments.workers, "kills": arguments.kills} | measure(arguments))
        benchmark.save(rows, arguments.output)
    conclude = [
        f"Gossip on the topology `{arguments.topology}` trains a small ResNet on digits; a random worker gets SIGKILL "
        f"every {arguments.every_s:g} s. Restarted runs save every {arguments.checkpoint_every} steps. All processes "
        "share the cores of one machine, on which imports, and so a restart, take longer than on one host for each.",
    ]
    benchmark.write(rows, conclude, arguments.output, command_of(MODULE, arguments), "all used")
    return 0


def elastic(arguments: BenchArguments) -> dict[str, float]:
    """Return what one run that outlives its workers loses."""
    n, draw = arguments.workers, random.Random(arguments.seed)
    survivors_s, all_s = [], []
    overrides = [*ELASTIC, f"elastic.restarts={arguments.kills}"]
    with tempfile.TemporaryDirectory() as name, started(folder := Path(name), arguments, overrides):
        wait_for(calm, folder, n)
        begin = time.time()
        for number in range(arguments.kills):
            sleep_until(begin + (number + draw.uniform(0.2, 0.6)) * arguments.every_s)
            alive = wait_for(calm, folder, n)
            victim, killed = kill_one(alive, draw)
            survivors_s.append(wait_for(gone_on, folder, alive - {victim}, killed) - killed)
            all_s.append(wait_for(everybody, folder, killed, n) - killed)
        sleep_until(begin + arguments.kills * arguments.every_s)
        elapsed, notes = time.time() - begin, read_notes(folder)
    step_s = calm_step_s(notes)
    counted = sum(sum(note.time > begin for note in own) for own in notes.values())
    return summary(survivors_s, all_s, step_s, counted * step_s / (n * elapsed))


def restart(arguments: BenchArguments) -> dict[str, float]:
    """Return what a run loses that ends with each death and is started again at once."""
    n, draw = arguments.workers, random.Random(arguments.seed)
    overrides = [f"training.checkpoint_every={arguments.checkpoint_every}", "resume=true"]
    all_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder, begin, first, killed = Path(name), 0.0, 0, 0.0
        for number in range(arguments.kills + 1):
            with started(folder, arguments, overrides) as process:
                if number == 0:
                    wait_for(calm, folder, n)
                    begin, first = time.time(), last_step(folder)
                else:
                    all_s.append(wait_for(everybody, folder, killed, n) - killed)
                if number == arguments.kills:
                    sleep_until(begin + number * arguments.every_s)
                    break
                sleep_until(begin + (number + draw.uniform(0.2, 0.6)) * arguments.every_s)
                _, killed = kill_one(wait_for(calm, folder, n), draw)
                process.wait(PATIENCE_S)
        elapsed, steps = time.time() - begin, last_step(folder) - first
        step_s = calm_step_s(read_notes(folder))
    return summary(all_s, all_s, step_s, steps * step_s / elapsed)


def kill_one(pids: set[int], draw: random.Random) -> tuple[int, float]:
    """Kill one of the processes; return its number, and when."""
    victim, killed = draw.choice(sorted(pids)), time.time()
    os.kill(victim, signal.SIGKILL)
    return victim, killed


@contextmanager
def started(folder: Path, arguments: BenchArguments, overrides: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run, or continue it; end it afterwards."""
    (folder / "steps").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "cnn.train", *RUN, f"workers.count={arguments.workers}", *overrides]
    command += [f"training.batch_size={32 * arguments.workers}", f"topology={arguments.topology}"]
    command += [f"run_dir={folder}/run"]
    environment = os.environ | {"STEPS_FOLDER": f"{folder}/steps"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    except TimeoutError as error:
        error.add_note((folder / "log").read_text()[-4000:])
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Return the complete notes of each process, by its number."""
    notes = {}
    for file in (folder / "steps").iterdir():
        lines = file.read_text().rpartition("\n")[0].splitlines()
        notes[int(file.name)] = [Note(float(t), int(size), int(opened)) for t, size, opened in map(str.split, lines)]
    return notes


def calm(folder: Path, n: int) -> set[int] | None:
    """Return the processes that train, once there are n that have trained together for some steps."""
    recent = {
        pid
        for pid, own in read_notes(folder).items()
        if len(own) > CALM_STEPS and own[-1].time > time.time() - 2 and own[-CALM_STEPS].world_size == n
    }
    return recent if len(recent) == n else None


def gone_on(folder: Path, pids: set[int], since: float) -> float | None:
    """Return when the last of these processes had completed the first step of a later membership than at that time."""
    notes = read_notes(folder)
    before = {pid: max(note.opened for note in notes[pid] if note.time <= since) for pid in pids}
    return last_end([[note.time for note in notes[pid] if note.opened > before[pid]] for pid in pids])


def everybody(folder: Path, since: float, n: int) -> float | None:
    """Return when the last of n processes had completed its first step since then among n."""
    recent = [own for own in read_notes(folder).values() if own and own[-1].time > max(since, time.time() - 2)]
    begun = [[note.time for note in own if note.time > since and note.world_size == n] for own in recent]
    return last_end(begun) if len(recent) == n else None


def last_end(begun: Sequence[Sequence[float]]) -> float | None:
    """Return when the last process had completed its first step, given when each one's steps began; None: not yet."""
    return max(own[1] for own in begun) if all(len(own) > 1 for own in begun) else None


def calm_step_s(notes: Mapping[int, Sequence[Note]]) -> float:
    """Return the median time from the beginning of a step to that of the next, the longest of all processes."""
    gaps = [[after.time - note.time for note, after in pairwise(own)] for own in notes.values()]
    return max(statistics.median(own) for own in gaps if len(own) > CALM_STEPS)


def last_step(folder: Path) -> int:
    """Return the last step that the run has recorded."""
    lines = (folder / "run" / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return max((json.loads(line)["step"] for line in lines), default=0)


def summary(survivors_s: Sequence[float], all_s: Sequence[float], step_s: float, goodput: float) -> dict[str, float]:
    """Return the numbers of a row."""
    return {
        "step_ms": 1000 * step_s,
        "survivors_s": statistics.median(survivors_s),
        "survivors_worst_s": max(survivors_s),
        "all_s": statistics.median(all_s),
        "all_worst_s": max(all_s),
        "goodput": goodput,
    }


def wait_for(condition: Callable[..., Found | None], *arguments: Any) -> Found:
    """Return what the condition returns once that is not None. Raises TimeoutError."""
    end = time.monotonic() + PATIENCE_S
    while (found := condition(*arguments)) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{condition.__name__}: not so within {PATIENCE_S:g} s")
        time.sleep(0.02)
    return found


def sleep_until(moment: float) -> None:
    """Sleep until then."""
    time.sleep(max(0.0, moment - time.time()))


if __name__ == "__main__":
    sys.exit(main())
