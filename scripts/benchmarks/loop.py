"""Measures what the training loop costs: ours around one worker against a bare PyTorch loop.

python -m scripts.benchmarks.loop [width=32] [batches=64,256] [steps=100] [rounds=7] [threads=1]

Both train the small ResNet on the same digits with torch.optim.Adam in this process and take turns step by step, so
that what slows the machine down slows both alike. The bare loop draws a batch, runs forward and backward, steps the
optimizer and the schedule; ours also wraps the model, keeps records and random states, and can be interrupted and
resumed.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from pydantic import Field, PositiveInt
from torch.nn import functional as F

from cnn.config import CnnConfig
from cnn.data import open_data
from cnn.model import SmallResNet
from common.cli import Arguments, Text, command_of, main_function, parse
from common.optim import constant_with_warmup
from common.report.benchmark import Benchmark
from common.training.compose import compose_config
from scripts.benchmarks.turns import UNTIMED, run_by_turns

MODULE = "scripts.benchmarks.loop"
TOLERANCE = 0.02
LOOPS = {"decentralized": ["parallel=decentralized"], "allreduce": ["parallel=allreduce"]}
COLUMNS = {
    "batch_size": "images in a step",
    "loop": "ours with that `parallel`, one worker",
    "step_ms": "median over the steps of a round, then over the rounds",
    "bare_step_ms": "the same for the bare loop beside it",
    "ratio_to_bare": "of a step to the bare loop's step beside it: median over the steps, then over the rounds",
    "spread": "interquartile range of ratio_to_bare over the rounds",
}
FORMATS = {"ratio_to_bare": ".4f", "spread": ".4f"}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.loop."""

    width: PositiveInt = Field(32, description="of the small ResNet")
    batches: Text = Field("64,256", pattern=r"^\d+(,\d+)*$", description="images in a step")
    steps: PositiveInt = Field(100, ge=2 * UNTIMED, description="of a round")
    rounds: PositiveInt = Field(7, ge=2, description="runs of each loop")
    threads: PositiveInt = Field(1, description="CPU threads")
    output: Text = Field("results/benchmarks", description="where loop.csv and loop.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Times the loops, writes the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Times the training loop.")
    benchmark = Benchmark("loop", "The training loop", COLUMNS, FORMATS)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    rounds: dict[tuple[int, str], list[tuple[float, float, float]]] = {
        (batch, name): [] for batch in batches for name in LOOPS
    }
    for _ in range(arguments.rounds):
        for batch, name in rounds:
            rounds[batch, name].append(compare(name, batch, arguments))
    rows = [row(batch, name, results) for (batch, name), results in rounds.items()]
    used = f"{arguments.threads} used"
    benchmark.write(rows, conclude(rows, arguments), arguments.output, command_of(MODULE, arguments), used)
    return 0


def row(batch: int, name: str, results: Sequence[tuple[float, float, float]]) -> dict[str, object]:
    """One loop's line of the table."""
    ours, bare, ratios = zip(*results, strict=True)
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "batch_size": batch,
        "loop": name,
        "step_ms": 1000 * statistics.median(ours),
        "bare_step_ms": 1000 * statistics.median(bare),
        "ratio_to_bare": median,
        "spread": high - low,
    }


def overrides(batch: int, arguments: BenchArguments) -> list[str]:
    """The configuration of both loops."""
    return [
        "optimizer=adam",
        "schedule=constant",
        f"model.width={arguments.width}",
        f"training.batch_size={batch}",
        f"training.steps={arguments.steps}",
        f"training.threads={arguments.threads}",
    ]


def compare(name: str, batch: int, arguments: BenchArguments) -> tuple[float, float, float]:
    """(seconds of our step, of a bare one, their ratio) of one round."""
    config = compose_config(
        "cnn", overrides(batch, arguments)
    )  # here, not in train_bare's thread: Hydra stands one at a time
    rare = ["evaluation.every=1000000", "training.checkpoint_every=null", "logging.progress=false"]
    with tempfile.TemporaryDirectory() as folder:
        ours = [*overrides(batch, arguments), *LOOPS[name], *rare, f"run_dir={folder}/run"]
        return run_by_turns("cnn", ours, lambda boundary: train_bare(config, boundary)).compare()


def train_bare(config: CnnConfig, boundary: Callable[[], None]) -> None:
    """A loop written by hand."""
    torch.set_num_threads(config.training.threads)
    data = open_data(config)
    batches = data.train(0, 1, config.training.batch_size, torch.device("cpu"))
    model = SmallResNet(data.channels, data.classes, config.model.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    schedule = constant_with_warmup(optimizer)
    for step in range(config.training.steps):
        boundary()
        epoch, position = divmod(step, batches.steps_per_epoch)
        if position == 0:
            drawn = batches.epoch(epoch)
        images, labels = next(drawn)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def conclude(rows: Sequence[dict[str, object]], arguments: BenchArguments) -> list[str]:
    """What was measured and what it says."""
    verdicts = []
    for batch in dict.fromkeys(row["batch_size"] for row in rows):
        of_batch = [row for row in rows if row["batch_size"] == batch]
        worst, step = max(row["ratio_to_bare"] for row in of_batch) - 1, of_batch[0]["bare_step_ms"]
        verdicts.append(
            f"With {batch} images in a step ({step:.0f} ms) our loop costs {100 * worst:.1f} % more than the bare one "
            f"at worst: this {'meets' if worst <= TOLERANCE else 'misses'} the aim of at most {100 * TOLERANCE:.0f} %."
        )
    return [
        f"Small ResNet of width {arguments.width} on digits, {arguments.rounds} rounds of {arguments.steps} steps.",
        " ".join(verdicts),
    ]


if __name__ == "__main__":
    sys.exit(main())
