"""Measures how simulated workers should run: one after another (common.simulate) or all at once (torch.func.vmap).

python -m scripts.bench_simulate [workers=16] [batches=128,256,512] [threads=2] [seconds=8] [output=results/benchmarks]

A step is forward, backward, gossip and Adam on the CPU; data loading is not in it. The engines of one setting take
turns, so that a noisy machine slows all of them alike. Where other programs run beside it use threads=1: two threads
that wait for each other after every operator suffer out of all proportion, the loop with its small operators most.
"""

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pandas as pd
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from common.report.benchmark import Benchmark
from common.report.cli import Arguments, Text, UsageError, command_of, main_function, nearest, parse
from scripts.simulate_engines import BLOCKS, ENGINES, TOPOLOGY, Setting, difference_between

MODULE = "scripts.bench_simulate"
CHECKED_STEPS = 4  # a period of the topology on 16 workers
TOLERANCE = 1e-9  # between two right engines after CHECKED_STEPS in float64
LEAST_ROUNDS = 5
WORTH_IT = 1.5  # how much faster than the loop vmap must be on every block to make up for what it cannot run

COLUMNS = {
    "block": "what is trained (see above)",
    "engine": "one: a single worker, plain PyTorch; loop: common.simulate; vmap: one vmapped step of all workers",
    "workers": "number of workers that share the global batch",
    "global_batch": "samples of all workers in a step",
    "samples_per_s": "global_batch / duration of a step, median over the rounds",
    "spread": "interquartile range of samples_per_s over the rounds, in percent of the median",
    "ratio_to_one_worker": "samples_per_s over that of `one` in the same round, median over the rounds",
    "ratio_to_loop": "samples_per_s over that of `loop` in the same round, median over the rounds",
    "max_difference_to_loop": f"largest difference of any parameter or buffer after {CHECKED_STEPS} steps in float64 "
    "at the smallest batch (in float32 Adam makes a step of size lr of the rounding noise of a gradient that is 0)",
    "peak_mb": "by how much building the workers and two steps raise the peak resident memory of a fresh process",
    "unbatched": "operators without a batching rule, which vmap runs worker by worker",
}
FORMATS = {"samples_per_s": ",.0f", "spread": ".0f", "max_difference_to_loop": ".1e", "peak_mb": ".0f"}  # others: .2f


class BenchArguments(Arguments):
    """Command line of scripts.bench_simulate."""

    blocks: Text = Field(",".join(BLOCKS), description="what to train")
    batches: Text = Field("128,256,512", pattern=r"^\d+(,\d+)*$", description="global batches in samples")
    workers: PositiveInt = Field(16, description="simulated workers")
    threads: PositiveInt = Field(2, description="CPU threads")
    seconds: NonNegativeFloat = Field(8, description=f"for each block and batch; at least {LEAST_ROUNDS} rounds")
    output: Text = Field("results/benchmarks", description="where simulate.csv and simulate.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Checks that loop and vmap compute the same, times them, writes the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Times simulated workers: a loop against torch.func.vmap.")
    settings = read_settings(arguments)
    benchmark = Benchmark("simulate", "Simulated workers: one after another or all at once?", COLUMNS, FORMATS)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, object]] = []
    for block, of_block in settings.items():
        difference, unbatched = difference_between(of_block[0], CHECKED_STEPS)
        print(f"{block}: loop and vmap differ by {difference:.1e} after {CHECKED_STEPS} steps in float64", flush=True)
        if not difference < TOLERANCE:
            raise RuntimeError(f"{of_block[0]}: loop and vmap differ by {difference:.1e}, expected < {TOLERANCE:g}")
        checked = {"max_difference_to_loop": difference, "unbatched": " ".join(sorted(unbatched))}
        for setting in of_block:
            rows += measure(setting, arguments.seconds, checked)
    text = [
        f"Forward, backward, gossip ({TOPOLOGY}) and Adam, without data loading.",
        "\n".join(conclude(pd.DataFrame(rows))),
    ]
    used, command = f"{arguments.threads} used", command_of(MODULE, arguments)
    benchmark.write(rows, text, arguments.output, command, used)
    return 0


def read_settings(arguments: BenchArguments) -> dict[str, list[Setting]]:
    """The settings of each block, smallest batch first; UsageError if there is no such block or batch."""
    batches = sorted(int(batch) for batch in arguments.batches.split(","))
    if any(batch == 0 or batch % arguments.workers for batch in batches):
        raise UsageError(f"batches={arguments.batches}: expected multiples of workers={arguments.workers}")
    blocks = arguments.blocks.split(",")
    for block in blocks:
        if block not in BLOCKS:
            raise UsageError(f"blocks={block}: unknown; {nearest(block, BLOCKS)}")
    return {block: [Setting(block, arguments.workers, batch) for batch in batches] for block in blocks}


def measure(setting: Setting, seconds: float, checked: dict[str, object]) -> list[dict[str, object]]:
    """One row for each engine; the one of vmap carries what was `checked`."""
    rows = []
    rates = time_rounds(setting, seconds)
    for engine, values in rates.items():
        low, median, high = statistics.quantiles(values, n=4)
        row = {
            "block": setting.block,
            "engine": engine,
            "workers": 1 if engine == "one" else setting.workers,
            "global_batch": setting.batch,
            "samples_per_s": median,
            "spread": 100 * (high - low) / median,
            "ratio_to_one_worker": median_ratio(values, rates["one"]),
            "ratio_to_loop": median_ratio(values, rates["loop"]),
            "peak_mb": peak_mb(engine, setting),
        }
        rows.append(row | checked if engine == "vmap" else row)
        print(" ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return rows


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds: what slows a whole round down drops out."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def time_rounds(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """samples/s of each engine, one step in each round, for about `seconds`."""
    engines = {name: engine(setting) for name, engine in ENGINES.items()}
    for engine in engines.values():
        engine.step()  # allocates Adam's moments
    rates: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + seconds
    while len(rates["one"]) < LEAST_ROUNDS or time.perf_counter() < end:
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            rates[name].append(setting.batch / (time.perf_counter() - start))
    return rates


def peak_mb(engine: str, setting: Setting) -> float:
    """Peak memory in MB that the engine adds to a fresh process."""
    # Forked from a small server: a child started by this process would begin with this process's peak.
    context = get_context("forkserver")
    context.set_forkserver_preload(["pandas", "scripts.simulate_engines"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_peak_mb_here, engine, setting, torch.get_num_threads()).result()


def _peak_mb_here(engine: str, setting: Setting, threads: int) -> float:
    torch.set_num_threads(threads)
    ENGINES[engine](replace(setting, workers=1, batch=2)).step()  # what PyTorch loads on first use is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux
    workers = ENGINES[engine](setting)
    for _ in range(2):
        workers.step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6


def conclude(frame: pd.DataFrame) -> list[str]:
    """What the measurement says of each block, and which engine that makes the right one."""
    lines, slow = [], []
    for block, rows in frame.groupby("block", sort=False):
        loop, vmapped = (rows[rows.engine == engine] for engine in ("loop", "vmap"))
        lines += [
            f"- `{block}` ({BLOCKS[block].definition}): the loop reaches {_span(loop.ratio_to_one_worker)} of one "
            f"worker's samples/s, vmap {_span(vmapped.ratio_to_one_worker)}; vmap is "
            f"{_span(vmapped.ratio_to_loop)} times as fast as the loop."
        ]
        if vmapped.ratio_to_loop.min() < WORTH_IT:
            slow.append(f"`{block}`")
    verdict = f"It is not on {', '.join(slow)}: the loop is the right way" if slow else "It is: vmap is worth offering"
    return [
        *lines,
        "",
        "vmap does not run every model (no data-dependent branches, no hooks on parameters) and cannot draw each "
        "worker's dropout from that worker's own random numbers, as real workers do. So it should be at least "
        f"{WORTH_IT} times as fast on every block. {verdict}, on this CPU. A GPU was not measured.",
    ]


def _span(values: pd.Series) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (values.min(), values.max())))


if __name__ == "__main__":
    sys.exit(main())
