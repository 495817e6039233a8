"""Measure the update of accumulated AdamW against torch's AdamW, decent-dp's AccumAdamW and the machine's memory.

python -m scripts.benchmarks.optimizer [parameters=10,26,124] [threads=1,2] [rounds=9]

All update the same GPT-2-shaped parameters (fp32) and take turns, so that what slows the machine down slows all alike.
An update of a model is bound by memory: `copy limit` is the time that a kernel's own bytes take at the rate of a triad
a <- b + s c measured in the same rounds.

How long compiling takes is measured apart, each time from nothing: rows with a number of `tensors` of our own choice.
"""

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from tqdm import tqdm

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.flat import Bucket, FlatVector, cut
from common.optim import AccumAdamW, Hyper, decay_groups
from common.optim.compiled import Vectors, fused_kernel, update_compiled
from common.optim.flat_state import Incoming
from common.torch_internals import fresh_compiler_cache
from gpt2.model import GPT2, Shape
from scripts.benchmarks.arguments import names_of
from scripts.benchmarks.record import Benchmark

MODULE = "scripts.benchmarks.optimizer"
WINDOW = 4  # steps of a window of accumulated Adam; a round is one window
BUCKET_MB = 2.0
TRIAD_BYTES = 12  # an element's two reads and one write
FLAT = "one flat tensor"
COLUMNS = {
    "optimizer": "what is updated",
    "engine": "whose code",
    "parameters": "in millions",
    "tensors": "that hold them",
    "threads": "CPU threads",
    "bytes_per_element": "that the update reads and writes at least, mean over a window; null: not counted",
    "ns_per_element": "of one update, mean over a window, median over the rounds",
    "spread": "interquartile range of ns_per_element over the rounds",
    "ratio_to_fused_adamw": "of ns_per_element to torch.optim.AdamW(fused=True)",
    "ratio_to_decent_dp": "of ns_per_element to decent-dp's AccumAdamW",
    "ratio_to_flat": "of ns_per_element to the same kernel on one flat tensor, without parameters or an optimizer",
    "ratio_to_copy_limit": "of ns_per_element to bytes_per_element at the triad's rate",
    "first_s": "seconds of the first window, with all compiling that earlier rows left to do; in rows without other "
    "times nothing was compiled before",
}
FORMATS = dict.fromkeys(("ns_per_element", "spread", *(name for name in COLUMNS if name.startswith("ratio"))), ".3f")
SHAPES = {
    "10": Shape(layers=6, heads=6, width=384, vocabulary=512, context=256),
    "26": Shape(layers=26, heads=6, width=288, vocabulary=512, context=256),
    "124": Shape(layers=12, heads=12, width=768, vocabulary=50304, context=1024),
}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.optimizer."""

    parameters: names_of(SHAPES) = Field("10,26,124", description="millions, of 10, 26, 124")
    threads: Text = Field("1,2", pattern=r"^\d+(,\d+)*$", description="CPU threads")
    cold: Text = Field("10,40,160", pattern=r"^\d+(,\d+)*$", description="tensors that are compiled for from nothing")
    rounds: PositiveInt = Field(9, ge=3, description="windows of each")
    output: Text = Field("results/benchmarks", description="where optimizer.csv and optimizer.md are written")


class Contender(NamedTuple):
    """window(): WINDOW updates. bytes_per_element: see COLUMNS."""

    optimizer: str
    engine: str
    bytes_per_element: float | None
    window: Callable[[], None]


@main_function
def main(argv: Sequence[str]) -> int:
    """Time the updates, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time optimizers.")
    if importlib.util.find_spec("decent_dp") is None:
        raise UsageError("decent-dp is not installed: make env")
    benchmark = Benchmark("optimizer", "Updates of optimizers", COLUMNS, FORMATS)
    tables = [
        compare(size, threads, arguments.rounds)
        for threads in map(int, arguments.threads.split(","))
        for size in arguments.parameters.split(",")
    ]
    torch.set_num_threads(1)
    cold = [cold_start(engine, int(tensors)) for tensors in arguments.cold.split(",") for engine in COLD]
    said = conclude(pd.concat(tables), pd.DataFrame(cold))
    rows = pd.concat([*tables, pd.DataFrame(cold)]).to_dict("records")
    used = f"{arguments.threads} used"
    benchmark.write(rows, said, arguments.output, command_of(MODULE, arguments), used, ["decent-dp"])
    return 0


def compare(size: str, threads: int, rounds: int) -> pd.DataFrame:
    """Return the table's rows for one number of parameters."""
    torch.set_num_threads(threads)
    contenders, triad, elements, tensors = contenders_of(SHAPES[size])
    first = [seconds(contender.window) for contender in contenders]
    windows = [triad, *(contender.window for contender in contenders)]
    rows = tqdm(range(rounds), desc=f"{size} M, {threads} threads", disable=None)
    taken = np.array([[seconds(window) for window in windows] for _ in rows]) / WINDOW / elements * 1e9
    low, median, high = np.quantile(taken, [0.25, 0.5, 0.75], axis=0, method="weibull")
    frame = pd.DataFrame(contenders).drop(columns="window").astype({"bytes_per_element": float})
    frame = frame.assign(
        parameters=int(size), tensors=tensors, threads=threads, ns_per_element=median[1:], spread=(high - low)[1:]
    )
    ns = frame.set_index(["optimizer", "engine"]).ns_per_element
    return frame.assign(
        ratio_to_fused_adamw=frame.ns_per_element / ns["AdamW", "torch fused"],
        ratio_to_decent_dp=frame.ns_per_element / ns["AccumAdamW", "decent-dp"],
        ratio_to_flat=frame.ns_per_element / frame.optimizer.map(ns.xs(FLAT, level="engine")),
        ratio_to_copy_limit=frame.ns_per_element / (frame.bytes_per_element * median[0] / TRIAD_BYTES),
        first_s=first,
    )


def contenders_of(shape: Shape) -> tuple[list[Contender], Callable[[], None], int, int]:
    """Return what takes turns, a window of triads, elements, tensors. All updates share parameters, not gradients."""
    from decent_dp.optim import AccumAdamW as PeerAccumAdamW

    torch.manual_seed(0)
    module = GPT2(shape)
    named = list(module.named_parameters())
    vector = FlatVector(named)  # as the engine lays them out; for the others views are as good as any tensors
    parameters = vector.parameters
    gradients = [torch.randn_like(parameter).mul_(0.01) for parameter in parameters]
    received = torch.randn_like(vector.data)
    b, c = torch.randn_like(vector.data), torch.empty_like(vector.data)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    accumulated = options | {"accumulation_steps": WINDOW}
    groups = decay_groups(module, options["weight_decay"])  # gains of norms do not decay
    fused = AccumAdamW(groups, **accumulated, fused=True)
    fused.flatten_state([vector], place_gradients=True)
    sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True)).backward()
    buckets = [Bucket(0, span) for span in cut(vector.numel, vector.data.element_size(), BUCKET_MB * 2**20)]

    def merge_and_update() -> None:
        fused.arriving = lambda: ((b, Incoming(received[b.span], 0.5, 0.5)) for b in buckets)
        fused.step()
        fused.arriving = None

    def merge_then(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def update() -> None:
            vector.data.lerp_(received, 0.5)
            optimizer.step()

        return update

    # x, g, m, v, a are read, x and a written in each step; m and v too at the end of a window, where a becomes 0.
    own = 4 * (7 + 2 / WINDOW)
    merge = "merge + AccumAdamW"
    contenders = [
        Contender("AdamW", "torch foreach", None, torch.optim.AdamW(parameters, **options).step),
        Contender("AdamW", "torch fused", 4 * 7.0, torch.optim.AdamW(parameters, **options, fused=True).step),
        Contender("AccumAdamW", "decent-dp", None, PeerAccumAdamW(parameters, **options, accum_iter=WINDOW).step),
        Contender("AccumAdamW", "ours foreach", None, AccumAdamW(groups, **accumulated).step),
        Contender("AccumAdamW", "ours fused", own, fused.step),
        Contender("AccumAdamW", FLAT, own, flat_update(vector.numel, fused)),
        Contender(merge, "decent-dp", None, merge_then(PeerAccumAdamW(parameters, **options, accum_iter=WINDOW))),
        Contender(merge, "ours fused, bucket by bucket", own + 4, merge_and_update),
        Contender(merge, FLAT, own + 4, flat_update(vector.numel, fused, received)),
    ]
    contenders = [c._replace(window=repeated(c.window)) for c in contenders]
    triad = repeated(lambda: torch.add(vector.data, b, alpha=0.5, out=c))
    return contenders, triad, vector.numel, len(parameters)


def flat_update(numel: int, like: AccumAdamW, received: Tensor | None = None) -> Callable[[], None]:
    """Return an update of one flat tensor [numel] by the kernel alone, with the hyperparameters of `like`."""
    # Nothing but zeros would be one page of memory that the system maps everywhere.
    x, g = torch.randn(numel), torch.randn(numel).mul_(0.01)
    vectors = Vectors(x, g, *(torch.zeros(numel) for _ in range(3)), received=received)
    hyper, count = Hyper.of(like.param_groups[0], decoupled=True), itertools.count(1)

    @torch.no_grad()
    def update() -> None:
        update_compiled(vectors, next(count), hyper, 0.5, 0.5)

    return update


def compiled_adamw(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Return torch's AdamW, all tensors in one graph."""
    return torch.compile(torch.optim.AdamW(parameters, lr=1e-4, foreach=True).step)


def fused_accum_adamw(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Return the step of our fused AccumAdamW."""
    return AccumAdamW(parameters, lr=1e-4, accumulation_steps=WINDOW, fused=True).step


COLD = {"torch foreach, torch.compile": ("AdamW", compiled_adamw), "ours fused": ("AccumAdamW", fused_accum_adamw)}


def cold_start(engine: str, tensors: int) -> dict[str, object]:
    """Return the row of a first window of which nothing was compiled before, of 10 M parameters in many tensors."""
    optimizer, step_of = COLD[engine]
    mean = 10_000_000 // tensors
    sizes = [mean // 2 + mean * index // tensors for index in range(tensors)]  # no two of them alike
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    torch.compiler.reset()
    fused_kernel.cache_clear()
    with fresh_compiler_cache():
        first_s = seconds(repeated(step_of(parameters)))
    row = {"optimizer": optimizer, "engine": engine, "parameters": 10, "tensors": tensors, "threads": 1}
    return row | {"first_s": first_s}


def repeated(update: Callable[[], object]) -> Callable[[], None]:
    """Return a window of updates."""

    def window() -> None:
        for _ in range(WINDOW):
            update()

    return window


def seconds(function: Callable[[], None]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def conclude(measured: pd.DataFrame, cold: pd.DataFrame) -> list[str]:
    """Return what was measured and what it says."""
    compiling = [
        f"{name} {' / '.join(found.map('{:.1f}'.format))} s"
        for name, found in cold.groupby("engine", sort=False).first_s
    ]
    tensors = " / ".join(map(str, cold.tensors.unique()))
    ours = measured[measured.engine.str.startswith("ours fused")]
    peer = ours.ratio_to_decent_dp[ours.optimizer == "AccumAdamW"].max()
    return [
        f"GPT-2-shaped parameters in fp32 on the CPU, windows of {WINDOW} steps, buckets of {BUCKET_MB:g} MiB.",
        f"Ours takes at most {peer:.2f} of the time of decent-dp's AccumAdamW and at most "
        f"{ours.ratio_to_copy_limit.max():.2f} of the time that its bytes take at the triad's rate.",
        f"A first window of 10 M parameters, compiled from nothing, in {tensors} tensors: {'; '.join(compiling)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
