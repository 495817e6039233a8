"""Measures what the training loop costs: ours around one worker against a bare PyTorch loop.

python -m scripts.bench_loop [width=32] [batch_size=64] [steps=200] [rounds=7] [threads=1] [output=results/benchmarks]

Both train the small ResNet on the same digits with torch.optim.Adam in this process, in turns, so that noise on the
machine slows both alike. The bare loop draws a batch, runs forward and backward, steps the optimizer and the schedule;
ours also wraps the model, keeps records and random states, and can be interrupted and resumed.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from pydantic import Field, PositiveInt
from torch.nn import functional as F

from cnn.data import open_data
from cnn.model import SmallResNet
from common.optim import constant_with_warmup
from common.report.cli import Arguments, Text, command_of, main_function, parse
from common.training.compose import compose_config
from common.training.environment import describe_environment
from common.training.launch import launch

MODULE = "scripts.bench_loop"
TOLERANCE = 0.02
LOOPS = {"decentralized": ["parallel=decentralized"], "allreduce": ["parallel=allreduce"]}
COLUMNS = {
    "loop": "bare: written by hand; else ours with that `parallel`, one worker",
    "step_ms": "median over the steps of a round, then over the rounds",
    "ratio_to_bare": "step_ms over that of the bare loop in the same round, median over the rounds",
    "spread": "interquartile range of ratio_to_bare over the rounds",
}


class BenchArguments(Arguments):
    """Command line of scripts.bench_loop."""

    width: PositiveInt = Field(32, description="of the small ResNet")
    batch_size: PositiveInt = Field(64, description="images in a step")
    steps: PositiveInt = Field(200, ge=20, description="of a round")
    rounds: PositiveInt = Field(7, ge=2, description="turns of each loop")
    threads: PositiveInt = Field(1, description="CPU threads")
    output: Text = Field("results/benchmarks", description="where loop.csv and loop.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Times the loops, writes the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Times the training loop.")
    times: dict[str, list[float]] = {"bare": [], **{name: [] for name in LOOPS}}
    for number in range(arguments.rounds):
        turn = number % len(times)
        for name in [*times][turn:] + [*times][:turn]:
            times[name].append(bare_step_ms(arguments) if name == "bare" else our_step_ms(name, arguments))
    frame = pd.DataFrame([row(name, times) for name in times], columns=list(COLUMNS))
    write(frame, arguments)
    print(frame.to_string(index=False), f"\nwritten: {arguments.output}/loop.csv and .md")
    return 0


def row(name: str, times: dict[str, list[float]]) -> dict[str, object]:
    """One loop's line of the table."""
    ratios = [ours / bare for ours, bare in zip(times[name], times["bare"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"loop": name, "step_ms": statistics.median(times[name]), "ratio_to_bare": median, "spread": high - low}


def overrides(arguments: BenchArguments) -> list[str]:
    """The configuration of both loops."""
    return [
        "optimizer=adam",
        "schedule=constant",
        f"model.width={arguments.width}",
        f"training.batch_size={arguments.batch_size}",
        f"training.steps={arguments.steps}",
        f"training.threads={arguments.threads}",
    ]


def bare_step_ms(arguments: BenchArguments) -> float:
    """Median time of a step of a loop written by hand."""
    config = compose_config("cnn", overrides(arguments))
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    data = open_data(config)
    batches = data.train(0, 1, arguments.batch_size, torch.device("cpu"))
    model = SmallResNet(data.channels, data.classes, arguments.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    schedule = constant_with_warmup(optimizer)
    times: list[float] = []
    epoch = 0
    while len(times) < arguments.steps:
        since = time.perf_counter()
        for images, labels in batches.epoch(epoch):
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            now = time.perf_counter()
            times.append(now - since)
            since = now
        epoch += 1
    return 1000 * statistics.median(times[: arguments.steps])


def our_step_ms(name: str, arguments: BenchArguments) -> float:
    """Median time of a step of a run, from its own record."""
    with tempfile.TemporaryDirectory() as folder:
        rare = ["evaluation.every=1000000", "training.checkpoint_every=null", "logging.progress=false"]
        code = launch("cnn", [*overrides(arguments), *LOOPS[name], *rare, f"run_dir={folder}/run"])
        if code:
            raise RuntimeError(f"the run with {LOOPS[name]} ended with exit code {code}")
        return json.loads((Path(folder) / "run" / "summary.json").read_text())["time_step_ms"]


def conclude(frame: pd.DataFrame) -> str:
    """What the measurement says."""
    ours = frame[frame.loop != "bare"]
    worst = ours.ratio_to_bare.max() - 1
    return (
        f"Our loop costs {100 * worst:.1f} % more than the bare one at worst: this "
        f"{'meets' if worst <= TOLERANCE else 'misses'} the aim of at most {100 * TOLERANCE:.0f} %."
    )


def write(frame: pd.DataFrame, arguments: BenchArguments) -> None:
    """Writes <output>/loop.csv and loop.md."""
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "loop.csv", index=False, lineterminator="\n", float_format="%.6g")
    environment = describe_environment("", [])
    hardware, versions = environment["hardware"], environment["versions"]
    lines = [
        "# The training loop",
        "",
        f"Small ResNet of width {arguments.width} on digits, batch {arguments.batch_size}, {arguments.rounds} rounds "
        f"of {arguments.steps} steps, {arguments.threads} thread(s). {conclude(frame)}",
        "",
        frame.to_markdown(index=False, floatfmt=["", ".2f", ".4f", ".4f"]),
        "",
        *(f"- `{name}`: {definition}" for name, definition in COLUMNS.items()),
        "",
        f"- Hardware: {hardware['cpu']}, {hardware['cores']} cores",
        f"- Software: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- Date: {environment['start']}",
        f"- Commit: {environment['git_commit']}{' with uncommitted changes' * environment['git_dirty']}",
        f"- Made by `{command_of(MODULE, arguments)}`",
    ]
    (folder / "loop.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
