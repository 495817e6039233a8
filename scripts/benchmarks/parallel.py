"""Measure engines of data parallelism against each other on emulated hosts: DDP, decent-dp and this project's.

python -m scripts.benchmarks.parallel [layouts=8x1,4x2] [mbit_per_s=200] [compute_ms=400,1200] [models=gpt_5m] ...

Every engine trains the same model from the same seed, in the same run. compute_ms=0 trains really; other values replace
forward and backward by a wait (emulated_compute.py). Needs root (scripts.emulate). What the table in `output` holds is
not measured again without --again; what is measured is added to it at once, so that the same command goes on after an
interruption. All rows of a table are of one machine, one commit and the same settings. An engine that fails is named,
and the others are still measured.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt
from tqdm import tqdm

from common.cli import Arguments, Text, UsageError, command_of, main_function, nearest, parse
from common.report.benchmark import Benchmark
from common.runtime.conditions import CONDITIONS
from common.training.environment import now
from scripts.benchmarks.parallel_engines import MODELS
from scripts.benchmarks.parallel_table import COLUMNS, FORMATS, KEY, cases, conclude, table
from scripts.emulate.program import EmulateArguments, check_machine, emulated_hosts, end_like_an_interruption, run_on

MODULE = "scripts.benchmarks.parallel"
NUMBERS = r"^[\d.]+(,[\d.]+)*$"
ENGINES = ("alone", "ddp", "decent_dp", "ours_torch", "ours_local", "ours")


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.parallel."""

    layouts: Text = Field("8x1,4x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS,...")
    mbit_per_s: Text = Field("200", pattern=NUMBERS, description="rates of the hosts' links")
    delay_ms: float = Field(1, ge=0, description="one-way, between hosts")
    models: Text = Field("gpt_5m", description="of gpt_5m, gpt_30m, digits_resnet")
    compute_ms: Text = Field("400,1200", pattern=NUMBERS, description="of a step, emulated; 0: really computed")
    conditions: Text = Field("even", description=f"how unevenly ranks compute: of {', '.join(CONDITIONS)}")
    engines: Text = Field(",".join(ENGINES), description="which to measure")
    topologies: Text | None = Field(None, description="which to measure, under their engines' names; none: all")
    bucket_mb: PositiveFloat = Field(2, description="of our messages, in MiB")
    peers_bucket_mb: PositiveFloat = Field(5, description="of DDP's and decent-dp's")
    steps: PositiveInt = Field(12, description="of a round: a multiple of the schedules' periods")
    rounds: PositiveInt = Field(2, description="that are timed")
    limit_s: PositiveFloat = Field(1800, description="an engine that takes longer is given up")
    again: bool = Field(False, description="measure what the table holds too")
    name: Text = Field("parallel", pattern=r"^[a-z0-9_]+$", description="of the table's files")
    output: Text = Field("results/benchmarks", description="where they are kept")


@dataclass(frozen=True)
class Measurement:
    """One engine on one emulated cluster."""

    hosts: int
    ranks_per_host: int
    mbit_per_s: float
    model: str
    condition: str
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
    benchmark = Benchmark(arguments.name, "Engines of data parallelism", COLUMNS, FORMATS)
    same = {name: getattr(arguments, name) for name in ("delay_ms", "steps", "rounds")}
    same |= {"machine": benchmark.machine, "commit": benchmark.commit}
    rows = {key_of(row): row for row in kept_rows(arguments, same)}
    failed = []
    for job in tqdm(list(jobs_of(arguments)), desc="engines", disable=None):
        wanted = map(float, arguments.compute_ms.split(","))
        missing = [ms for ms in wanted if arguments.again or key_of(vars(job) | {"compute_ms": ms}) not in rows]
        measured = measure(job, missing, arguments) if missing else []
        if measured is None:
            failed.append(job)
        elif measured:
            origin = same | {"date": now()}
            rows |= {key_of(row): row for row in (vars(job) | result | origin for result in measured)}
            benchmark.save(table(rows.values()).to_dict("records"), arguments.output)
    for job in failed:
        print(f"failed, left out: {job}", file=sys.stderr)
    if not rows:
        raise UsageError("nothing was measured")
    frame = table(rows.values())
    command = command_of(MODULE, arguments)
    benchmark.write(
        frame.to_dict("records"), conclude(frame, MODULE), arguments.output, command, "all used", ["decent-dp"]
    )
    return 1 if failed else 0


def check_names(arguments: BenchArguments) -> None:
    """Raise UsageError for an unknown engine, model, topology or condition."""
    topologies = {topology for _, topology in cases(ranks_per_host=2)}
    known = {"engines": ENGINES, "models": MODELS, "topologies": topologies, "conditions": CONDITIONS}
    for key, names in known.items():
        value = getattr(arguments, key)
        for name in [] if value is None else value.split(","):
            if name not in names:
                raise UsageError(f"{key}={value}: {name!r}: {nearest(name, names)}")


def key_of(row: Mapping[str, object]) -> tuple[object, ...]:
    """Return what tells a row from the others."""
    return tuple(row[name] for name in KEY)


def kept_rows(arguments: BenchArguments, same: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the rows of the table in `output`, if there is one.

    Raises UsageError where they are not of the `same` machine, commit and settings: they could not be compared.
    """
    file = Path(arguments.output) / f"{arguments.name}.csv"
    if not file.exists():
        return []
    frame = pd.read_csv(file, dtype={"commit": str})
    if missing := [name for name in COLUMNS if name not in frame]:
        raise UsageError(f"output={arguments.output}: {file.name} has no {', '.join(missing)}; give another output")
    rows = frame.to_dict("records")
    for row in rows:
        expected = same | {"bucket_mb": bucket_of(row["engine"], arguments)}
        for name, value in expected.items():
            if row[name] != value:
                there = f"{file.name} has rows of {row['engine']} with {name}={row[name]}, this is {name}={value}"
                raise UsageError(f"output={arguments.output}: {there}; give another output, or these settings")
    return rows


def jobs_of(arguments: BenchArguments) -> Iterator[Measurement]:
    """Yield all that is to be measured."""
    for layout in arguments.layouts.split(","):
        hosts, ranks_per_host = map(int, layout.split("x"))
        for rate in map(float, arguments.mbit_per_s.split(",")):
            for model, condition in product(arguments.models.split(","), arguments.conditions.split(",")):
                for engine, topology in cases(ranks_per_host):
                    wanted = arguments.topologies is None or topology in arguments.topologies.split(",")
                    if wanted and engine in arguments.engines.split(","):
                        bucket = bucket_of(engine, arguments)
                        yield Measurement(hosts, ranks_per_host, rate, model, condition, engine, topology, bucket)


def bucket_of(engine: str, arguments: BenchArguments) -> float:
    """Return the size of the engine's messages, in MiB."""
    return arguments.bucket_mb if engine.startswith("ours") else arguments.peers_bucket_mb


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
            "condition": job.condition,
            "bucket_mb": f"{job.bucket_mb:g}",
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "result": result,
        }
        program = ["-m", "scripts.benchmarks.parallel_engines", *(f"{key}={value}" for key, value in given.items())]
        code = run_on(hosts, job.ranks_per_host, program, limit_s=arguments.limit_s)
        return None if code else json.loads(result.read_text())


if __name__ == "__main__":
    sys.exit(main())
