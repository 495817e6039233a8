"""Measure engines of data parallelism against each other on emulated hosts: DDP, decent-dp and this project's.

python -m scripts.benchmarks.parallel [layouts=8x1,4x2] [mbit_per_s=200] [compute_ms=400,1200] [models=gpt_5m] ...

Every engine trains the same model from the same seed, in the same run. compute_ms=0 trains really; other values replace
forward and backward by a wait (emulated_compute.py). Needs root (scripts.emulate). What the table in `output` holds is
not measured again without --again; what is measured is added to it at once, so that the same command goes on after an
interruption. All rows of a table are of one machine and the same settings. An engine that fails is named, and the
others are still measured.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt
from tqdm import tqdm

from common.cli import Arguments, Text, UsageError, command_of, main_function, nearest, parse
from common.report.benchmark import Benchmark
from common.training.environment import now
from scripts.benchmarks.parallel_engines import MODELS
from scripts.emulate import EmulateArguments, check_machine, emulated_hosts, end_like_an_interruption, run_on

MODULE = "scripts.benchmarks.parallel"
NUMBERS = r"^[\d.]+(,[\d.]+)*$"
COLUMNS = {
    "engine": "alone: no communication, with torch's AdamW or ours; ours: this project's engine with its AdamW; "
    "ours_torch: the same engine with torch's AdamW, as DDP and decent-dp have it; ours_local: the same with local "
    "steps and an outer optimizer",
    "model": "gpt_5m, gpt_30m or digits_resnet",
    "hosts": "emulated",
    "ranks_per_host": "processes on each",
    "mbit_per_s": "rate of each host's link, both ways",
    "compute_ms": "forward and backward, emulated by a wait; 0: really computed, ranks taking turns on the cores",
    "topology": "under its engine's name; of ours_local with H, the updates in a round, and tau, after how many of the "
    "next one it is merged",
    "step_ms": "mean over ranks and the steps of a round, median over the rounds",
    "step_ms_spread": "largest minus smallest round",
    "exposed_ms": "step_ms minus that of `alone` with the same optimizer",
    "bytes_per_host": "that left the busiest host in a step, as its interface counts them: one header for each packet "
    "of up to 64 KB, which is cut later",
    "wire_ms": "what these bytes take at the rate of the link; with the headers of all frames 4 % more",
    "payload_mb": "parameters of a rank, in 1e6 bytes",
    "bucket_mb": "of messages, in MiB",
    "peak_mb": "resident memory of the largest rank; of the first compute_ms of a process only, as it never falls",
    "startup_s": "from the start of the slowest process until its first step begins; once for each process",
    "first_step_s": "of the slowest rank; ours compiles its optimizer in it",
    "ready_s": "from the start of the slowest process until the steps are as long as later ones, less what as many of "
    "those take: with all that is put off to the first steps",
    "ratio_to_ddp": "of step_ms to DDP's",
    "ratio_to_decent_dp": "of our step_ms to that of decent-dp on the same topology; below 1 is faster",
    "delay_ms": "one-way, from host to host",
    "steps": "of a round",
    "rounds": "that were timed",
    "machine": "on which the hosts are emulated",
    "date": "of the measurement, UTC",
    "commit": "of the measurement",
}
WHOLE = ("step_ms", "step_ms_spread", "exposed_ms", "bytes_per_host", "wire_ms", "peak_mb", "steps", "rounds")
FORMATS = dict.fromkeys(WHOLE, ".0f")
FORMATS |= dict.fromkeys(("ratio_to_ddp", "ratio_to_decent_dp"), ".3f")
FORMATS |= dict.fromkeys(("mbit_per_s", "compute_ms", "delay_ms", "bucket_mb"), "g")
# What decent-dp calls the topology that each of ours is compared with.
PEERS = {
    "complete": "complete",
    "one_peer_ring": "ring",
    "one_peer_exponential": "one-peer-exp",
    "hypercube": "one-peer-exp",
    "aer": "alternating-exp-ring",
}
ENGINES = ("alone", "ddp", "decent_dp", "ours_torch", "ours_local", "ours")
CASE = ["model", "hosts", "ranks_per_host", "mbit_per_s", "compute_ms"]  # ratios are taken within it
KEY = [*CASE, "engine", "topology"]  # one row of the table


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.parallel."""

    layouts: Text = Field("8x1,4x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS,...")
    mbit_per_s: Text = Field("200", pattern=NUMBERS, description="rates of the hosts' links")
    delay_ms: float = Field(1, ge=0, description="one-way, between hosts")
    models: Text = Field("gpt_5m", description="of gpt_5m, gpt_30m, digits_resnet")
    compute_ms: Text = Field("400,1200", pattern=NUMBERS, description="of a step, emulated; 0: really computed")
    engines: Text = Field(",".join(ENGINES), description="which to measure")
    topologies: Text | None = Field(None, description="which to measure, under their engines' names; none: all")
    bucket_mb: PositiveFloat = Field(2, description="of our messages, in MiB")
    peers_bucket_mb: PositiveFloat = Field(5, description="of DDP's and decent-dp's")
    steps: PositiveInt = Field(12, description="of a round: a multiple of the schedules' periods")
    rounds: PositiveInt = Field(2, description="that are timed")
    limit_s: PositiveFloat = Field(1800, description="an engine that takes longer is given up")
    again: bool = Field(False, description="measure what the table holds too")
    output: Text = Field("results/benchmarks", description="where parallel.csv and parallel.md are kept")


@dataclass(frozen=True)
class Measurement:
    """One engine on one emulated cluster."""

    hosts: int
    ranks_per_host: int
    mbit_per_s: float
    model: str
    engine: str
    topology: str
    bucket_mb: float


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure what is missing, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Measure engines on emulated hosts.")
    check_names(arguments)
    if "decent_dp" in arguments.engines.split(",") and importlib.util.find_spec("decent_dp") is None:
        raise UsageError("decent-dp is not installed: make env, or leave it out of engines")
    end_like_an_interruption()
    benchmark = Benchmark("parallel", "Engines of data parallelism", COLUMNS, FORMATS)
    rows = {key_of(row): row for row in kept_rows(arguments, benchmark.machine)}
    failed = []
    for job in tqdm(list(jobs_of(arguments)), desc="engines", disable=None):
        wanted = map(float, arguments.compute_ms.split(","))
        missing = [ms for ms in wanted if arguments.again or key_of(vars(job) | {"compute_ms": ms}) not in rows]
        measured = measure(job, missing, arguments) if missing else []
        if measured is None:
            failed.append(job)
        elif measured:
            origin = settings_of(arguments, benchmark.machine) | {"date": now(), "commit": benchmark.commit}
            rows |= {key_of(row): row for row in (vars(job) | result | origin for result in measured)}
            benchmark.save(table(rows.values()).to_dict("records"), arguments.output)
    for job in failed:
        print(f"failed, left out: {job}", file=sys.stderr)
    if not rows:
        raise UsageError("nothing was measured")
    frame = table(rows.values())
    command = command_of(MODULE, arguments)
    benchmark.write(
        frame.to_dict("records"), conclude(frame, arguments), arguments.output, command, "all used", ["decent-dp"]
    )
    return 1 if failed else 0


def check_names(arguments: BenchArguments) -> None:
    """Raise UsageError for an unknown engine, model or topology."""
    known = {"engines": ENGINES, "models": MODELS, "topologies": {topology for _, topology in cases(ranks_per_host=2)}}
    for key, names in known.items():
        value = getattr(arguments, key)
        for name in [] if value is None else value.split(","):
            if name not in names:
                raise UsageError(f"{key}={value}: {name!r}: {nearest(name, names)}")


def key_of(row: Mapping[str, object]) -> tuple[object, ...]:
    """Return what tells a row from the others."""
    return tuple(row[name] for name in KEY)


def kept_rows(arguments: BenchArguments, machine: str) -> list[dict[str, object]]:
    """Return the rows of the table in `output`, if there is one.

    Raises UsageError where they were measured on another machine or with other settings: they could not be compared.
    """
    file = Path(arguments.output) / "parallel.csv"
    if not file.exists():
        return []
    frame = pd.read_csv(file, dtype={"commit": str})
    if missing := [name for name in COLUMNS if name not in frame]:
        raise UsageError(f"output={arguments.output}: parallel.csv has no {', '.join(missing)}; give another output")
    rows = frame.to_dict("records")
    for row in rows:
        expected = settings_of(arguments, machine) | {"bucket_mb": bucket_of(row["engine"], arguments)}
        for name, value in expected.items():
            if row[name] != value:
                there = f"parallel.csv has rows of {row['engine']} with {name}={row[name]}, this is {name}={value}"
                raise UsageError(f"output={arguments.output}: {there}; give another output, or these settings")
    return rows


def jobs_of(arguments: BenchArguments) -> Iterator[Measurement]:
    """Yield all that is to be measured."""
    for layout in arguments.layouts.split(","):
        hosts, ranks_per_host = map(int, layout.split("x"))
        for rate in map(float, arguments.mbit_per_s.split(",")):
            for model in arguments.models.split(","):
                for engine, topology in cases(ranks_per_host):
                    wanted = arguments.topologies is None or topology in arguments.topologies.split(",")
                    if wanted and engine in arguments.engines.split(","):
                        bucket = bucket_of(engine, arguments)
                        yield Measurement(hosts, ranks_per_host, rate, model, engine, topology, bucket)


def bucket_of(engine: str, arguments: BenchArguments) -> float:
    """Return the size of the engine's messages, in MiB."""
    return arguments.bucket_mb if engine.startswith("ours") else arguments.peers_bucket_mb


def cases(ranks_per_host: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs (engine, topology) that are compared on such hosts."""
    yield from [("alone", "torch"), ("alone", "fused"), ("ddp", "complete")]
    yield from [("decent_dp", "complete"), ("decent_dp", "ring"), ("decent_dp", "one-peer-exp")]
    yield from [
        ("ours", "complete"),
        ("ours", "one_peer_ring"),
        ("ours", "hypercube"),
        ("ours", "one_peer_exponential"),
    ]
    if ranks_per_host > 1:
        yield from [("decent_dp", "alternating-exp-ring"), ("ours", "one_peer_exponential/between_hosts")]
        yield from [("ours", "one_peer_ring/staggered"), ("ours", "hypercube/staggered")]
    yield from [("ours", "aer"), ("ours", "aer/staggered")]
    yield from [("ours_local", "aer/4/4"), ("ours_local", "aer/12/4")]
    yield from [("ours_torch", "complete"), ("ours_torch", "aer/staggered")]


def settings_of(arguments: BenchArguments, machine: str) -> dict[str, object]:
    """Return what all rows of a table have in common."""
    return {name: getattr(arguments, name) for name in ("delay_ms", "steps", "rounds")} | {"machine": machine}


def measure(job: Measurement, compute_ms: Sequence[float], arguments: BenchArguments) -> list[dict[str, object]] | None:
    """Return what scripts.benchmarks.parallel_engines measures for each compute_ms; None if it failed."""
    cluster = EmulateArguments(
        hosts=job.hosts, ranks_per_host=job.ranks_per_host, mbit_per_s=job.mbit_per_s, delay_ms=arguments.delay_ms
    )
    check_machine(cluster)
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(cluster) as hosts:
        result = Path(folder) / "result.json"
        given = {
            "engine": job.engine,
            "topology": job.topology,
            "model": job.model,
            "compute_ms": ",".join(f"{ms:g}" for ms in compute_ms),
            "bucket_mb": f"{job.bucket_mb:g}",
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "result": result,
        }
        program = ["-m", "scripts.benchmarks.parallel_engines", *(f"{key}={value}" for key, value in given.items())]
        code = run_on(hosts, job.ranks_per_host, program, limit_s=arguments.limit_s)
        return None if code else json.loads(result.read_text())


def table(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return the rows with their ratios; engines in the order of `cases`."""
    order = [(engine, topology) for engine, topology in cases(ranks_per_host=2)]
    frame = pd.DataFrame(sorted(rows, key=lambda row: order.index((row["engine"], row["topology"]))))
    frame["wire_ms"] = frame.bytes_per_host * 8 / frame.mbit_per_s / 1e3

    def compared(row: pd.Series, engine: str, topology: str | None) -> float:
        same = (frame[CASE] == row[CASE]).all(axis=1) & (frame.engine == engine) & (frame.topology == topology)
        return frame[same].step_ms.item() if same.any() else float("nan")

    for index, row in frame.iterrows():
        optimizer = "fused" if row.engine == "ours" or row.topology == "fused" else "torch"
        frame.loc[index, "exposed_ms"] = row.step_ms - compared(row, "alone", optimizer)
        frame.loc[index, "ratio_to_ddp"] = row.step_ms / compared(row, "ddp", "complete")
        peer = PEERS.get(row.topology.split("/")[0]) if row.engine.startswith("ours") else None
        frame.loc[index, "ratio_to_decent_dp"] = row.step_ms / compared(row, "decent_dp", peer)
    return frame.sort_values(CASE, kind="stable")


def conclude(frame: pd.DataFrame, arguments: BenchArguments) -> list[str]:
    """Return what was measured, the fastest topology of every cluster, and memory and start beside decent-dp's."""
    findings = [*fastest(frame), *beside_decent_dp(frame)]
    return [
        "Emulated hosts on one machine (network namespaces, rate-limited links, "
        f"{arguments.delay_ms:g} ms from host to host), gloo, AdamW: torch's for the others, ours fused for `ours`, "
        "which merges and updates in one pass.",
        f"Each row is what `python -m {MODULE} layouts=HOSTSxRANKS mbit_per_s=RATE models=MODEL compute_ms=MS "
        "engines=ENGINE topologies=TOPOLOGY --again` measures with the row's values, at its commit.",
        *(["\n".join(f"- {finding}" for finding in findings)] if findings else []),
    ]


def fastest(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the fastest row of `ours` on each cluster with its ratios."""
    for (model, hosts, ranks, rate, compute_ms), rows in frame[frame.engine == "ours"].groupby(CASE, sort=False):
        best = rows.loc[rows.step_ms.idxmin()]
        times = {"DDP's": best.ratio_to_ddp, "decent-dp's on the same topology": best.ratio_to_decent_dp}
        ratios = [f"{ratio:.3f} of {name}" for name, ratio in times.items() if pd.notna(ratio)]
        case = f"{model}, {hosts}x{ranks}, {rate:g} Mbit/s, {compute_ms:g} ms"
        yield ", ".join([f"{case}: ours is fastest on {best.topology}, {best.step_ms:.0f} ms a step", *ratios])


def beside_decent_dp(frame: pd.DataFrame) -> Iterator[str]:
    """Yield memory and start of ours in terms of decent-dp's: medians over the topologies that one commit measured."""
    started = frame[frame.startup_s.notna()]
    for (model, hosts, ranks), rows in started.groupby(["model", "hosts", "ranks_per_host"]):
        for engine in ("ours", "ours_torch"):
            same = of_one_commit(rows, engine, "decent_dp").set_index("engine")
            ratios = []
            for what, column in (("peak memory", "peak_mb"), ("start", "startup_s"), ("ready", "ready_s")):
                known = same[column].dropna()
                if {engine, "decent_dp"} <= set(known.index):
                    ratio = known[[engine]].median() / known[["decent_dp"]].median()
                    ratios.append(f"{what} {ratio:.3f}")
            if ratios:
                place = f"{model}, {hosts}x{ranks}, {engine}, {same.commit.iloc[0]}"
                yield f"{place}: {', '.join(ratios)} of decent-dp's (medians over topologies)"


def of_one_commit(rows: pd.DataFrame, *engines: str) -> pd.DataFrame:
    """Return the rows of these engines that the last commit with all of them measured: imports change with commits."""
    commits = [set(rows[rows.engine == engine].commit) for engine in engines]
    both = rows[rows.commit.isin(set.intersection(*commits)) & rows.engine.isin(engines)].sort_values("date")
    return both[both.commit == both.commit.iloc[-1]] if len(both) else both


if __name__ == "__main__":
    sys.exit(main())
