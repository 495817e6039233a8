"""Measure how long training stands still when a worker is killed, and how much of the time is lost in all.

python -m scripts.benchmarks.recovery [workers=4] [kills=10] [every_s=60] [--torchft]

elastic: gossip that goes on without the dead worker, which is replaced (elastic.min_workers, elastic.restarts);
         members connect anew, and in a second row reconfigure their process groups, where torch can (elastic.groups)
torchft: gradients averaged by torchft, whose workers agree in every step on who takes part; with its own timeouts, and
         with shorter ones
restart: what one does without either: the run ends, and the same command continues from its last checkpoint
"""

import importlib.util
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.torch_internals import can_reconfigure
from scripts.benchmarks.record import Benchmark
from scripts.benchmarks.task import Note, read_notes

MODULE = "scripts.benchmarks.recovery"
COLUMNS = {
    "how": "elastic: the others go on, a new worker joins, process groups are new or reconfigured; torchft: so do its, "
    "with its timeouts or those given; restart: the run is started again, from its checkpoint",
    "workers": "processes",
    "kills": "a random worker each time",
    "step_ms": "of a step while all train: mean from a second after a recovery to the next kill",
    "survivors_s": "from the kill until every survivor has completed a step in the next membership, which may have a "
    "new worker already: median over kills",
    "survivors_worst_s": "the longest",
    "all_s": "from the kill until as many workers as before have completed a step: median over kills",
    "all_worst_s": "the longest",
    "goodput": "steps of workers that counted, in terms of what all would have made in the time that passed",
}
FORMATS = {"step_ms": ".1f", "survivors_s": ".3f", "survivors_worst_s": ".3f", "goodput": ".3f"}
MODEL = ["model.width=4", "training.threads=1", "schedule=constant"]
TRAIN = ["-m", "cnn.train", "task=scripts.benchmarks", "training.steps=1000000", "evaluation.every=1000000"]
TRAIN += ["logging.every=10", "logging.progress=false", "run_dir=run", *MODEL]
ELASTIC = ["elastic.min_workers=1", "training.checkpoint_every=null"]
TORCHFT = ["-m", "scripts.benchmarks.torchft_run"]
TORCHFT_MS = 300  # of torchft's lighthouse, in a second row; its workers tell it every 100 ms that they live
TIMEOUT_S, CALM_STEPS = 300.0, 20
SETTLED_S = 1.0  # from a recovery until steps take their usual time
Found = TypeVar("Found")


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.recovery."""

    workers: PositiveInt = Field(4, ge=3, description="processes on this machine")
    kills: PositiveInt = Field(10, description="of each way to recover")
    every_s: PositiveFloat = Field(60, description="seconds from one kill to the next")
    checkpoint_every: PositiveInt = Field(100, description="steps between the checkpoints to restart from")
    topology: Text = Field("ring", description="of the workers")
    torchft: bool = Field(False, description="measure it, too: on Linux on x86-64 `make env` installs it")
    seed: int = Field(0, description="of who is killed, and when")
    output: Text = Field("results/benchmarks", description="where the table is written, as .csv and .md")


@main_function
def main(argv: Sequence[str]) -> int:
    """Kill workers in each way to recover, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Measure recovery from the death of workers.")
    if arguments.torchft and importlib.util.find_spec("torchft") is None:
        raise UsageError("--torchft: it is not installed; `make env` does that on Linux on x86-64")
    n = arguments.workers
    training = [*TRAIN, f"workers.count={n}", f"training.batch_size={32 * n}", f"topology={arguments.topology}"]
    elastic = [*training, *ELASTIC, f"elastic.restarts={arguments.kills}"]
    ways = {"elastic": [*elastic, "elastic.groups=new"]}
    if can_reconfigure(torch.device("cpu")):
        ways["elastic, reconfigured"] = [*elastic, "elastic.groups=reconfigured"]
    ways["restart"] = [*training, f"training.checkpoint_every={arguments.checkpoint_every}", "resume=true"]
    if arguments.torchft:
        for name, milliseconds in ("torchft", 0), (f"torchft, {TORCHFT_MS} ms", TORCHFT_MS):
            ways[name] = [*TORCHFT, str(n), str(milliseconds), *MODEL, f"training.batch_size={32 * n}"]
    benchmark = Benchmark("recovery", "Recovery from the death of a worker", COLUMNS, FORMATS)
    rows = []
    for how, program in ways.items():
        found = measure(arguments, program, restarts=how == "restart")
        rows.append({"how": how, "workers": n, "kills": arguments.kills} | found)
        benchmark.save(rows, arguments.output)
    conclude = [
        f"Gossip on the topology `{arguments.topology}` trains a small ResNet on digits; torchft averages gradients "
        "of the same network. A random worker gets SIGKILL every "
        f"{arguments.every_s:g} s. Restarted runs save every {arguments.checkpoint_every} steps. Processes share the "
        "cores of one machine, on which imports, and so a restart, take longer than on one host for each.",
    ]
    packages = ["torchft"] if arguments.torchft else []
    benchmark.write(rows, conclude, arguments.output, command_of(MODULE, arguments), "all used", packages)
    return 0


def measure(arguments: BenchArguments, program: Sequence[str], restarts: bool) -> dict[str, float]:
    """Return what a run loses that outlives its workers, or that ends with each death and is started again at once."""
    n, draw = arguments.workers, random.Random(arguments.seed)
    survivors_s, all_s, kills = [], [], []
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        process = processes.enter_context(started(folder, program))
        wait_for(calm, folder, n)
        begin, first = time.time(), last_step(folder) if restarts else 0
        for number in range(arguments.kills):
            sleep_until(begin + (number + draw.uniform(0.2, 0.6)) * arguments.every_s)
            alive = wait_for(calm, folder, n)
            victim, killed = draw.choice(sorted(alive)), time.time()
            os.kill(victim, signal.SIGKILL)
            kills.append(killed)
            if restarts:
                process.wait(TIMEOUT_S)
                process = processes.enter_context(started(folder, program))
            else:
                survivors_s.append(wait_for(gone_on, folder, alive - {victim}, killed) - killed)
            all_s.append(wait_for(everybody, folder, killed, n) - killed)
        sleep_until(begin + arguments.kills * arguments.every_s)
        end, notes = time.time(), read_notes(folder / "steps")
        steps = last_step(folder) - first if restarts else begun(notes, begin, end) / n
    step_s = calm_step_s(notes, calm_times(begin, kills, all_s, end), n)
    survivors_s = survivors_s or all_s
    return {
        "step_ms": 1000 * step_s,
        "survivors_s": statistics.median(survivors_s),
        "survivors_worst_s": max(survivors_s),
        "all_s": statistics.median(all_s),
        "all_worst_s": max(all_s),
        "goodput": steps * step_s / (end - begin),
    }


@contextmanager
def started(folder: Path, program: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Python program in this folder, or start it again; end it and its workers afterwards."""
    (folder / "steps").mkdir(exist_ok=True)
    environment = os.environ | {"STEPS_FOLDER": f"{folder}/steps"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *program], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    except TimeoutError as error:
        error.add_note((folder / "log").read_text()[-4000:])
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def calm(folder: Path, n: int) -> set[int] | None:
    """Return the processes that train, once there are n that have trained together for some steps."""
    recent = {
        pid
        for pid, own in read_notes(folder / "steps").items()
        if len(own) > CALM_STEPS and own[-1].time > time.time() - 2 and own[-CALM_STEPS].world_size == n
    }
    return recent if len(recent) == n else None


def gone_on(folder: Path, pids: set[int], since: float) -> float | None:
    """Return when the last of these processes had completed the first step of a later membership than at that time."""
    notes = read_notes(folder / "steps")
    before = {pid: max(note.membership for note in notes[pid] if note.time <= since) for pid in pids}
    return last_end([[note.time for note in notes[pid] if note.membership > before[pid]] for pid in pids])


def everybody(folder: Path, since: float, n: int) -> float | None:
    """Return when the last of n processes had completed its first step since then among n."""
    recent = [
        own for own in read_notes(folder / "steps").values() if own and own[-1].time > max(since, time.time() - 2)
    ]
    steps = [[note.time for note in own if note.time > since and note.world_size == n] for own in recent]
    return last_end(steps) if len(recent) == n else None


def last_end(steps: Sequence[Sequence[float]]) -> float | None:
    """Return when the last process had completed its first step, given when each one's steps began; None: not yet."""
    return max(own[1] for own in steps) if all(len(own) > 1 for own in steps) else None


def calm_times(begin: float, kills: Sequence[float], all_s: Sequence[float], end: float) -> list[tuple[float, float]]:
    """Return the times from the begin, or from when a recovery has settled, to the next kill, or the end."""
    settled = [killed + seconds + SETTLED_S for killed, seconds in zip(kills, all_s, strict=True)]
    return [(start, stop) for start, stop in zip([begin, *settled], [*kills, end], strict=True) if start < stop]


def begun(notes: Mapping[int, Sequence[Note]], start: float, stop: float) -> int:
    """Return how many steps, of all processes, began in that time."""
    return sum(start < note.time <= stop for own in notes.values() for note in own)


def calm_step_s(notes: Mapping[int, Sequence[Note]], times: Sequence[tuple[float, float]], n: int) -> float:
    """Return the mean time of a step of n processes in these times."""
    return n * sum(stop - start for start, stop in times) / sum(begun(notes, *time) for time in times)


def last_step(folder: Path) -> int:
    """Return the last step that the run has recorded."""
    lines = (folder / "run" / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return max((json.loads(line)["step"] for line in lines), default=0)


def wait_for(condition: Callable[..., Found | None], *arguments: Any) -> Found:
    """Return what the condition returns once that is not None. Raises TimeoutError."""
    end = time.monotonic() + TIMEOUT_S
    while (found := condition(*arguments)) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{condition.__name__}: not so within {TIMEOUT_S:g} s")
        time.sleep(0.02)
    return found


def sleep_until(moment: float) -> None:
    """Sleep until then."""
    time.sleep(max(0.0, moment - time.time()))


if __name__ == "__main__":
    sys.exit(main())
