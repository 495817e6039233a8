"""Measure averaging and steps on several hosts: emulated ones, or those of the launcher that started this.

python -m scripts.benchmarks.hosts measure=averaging layouts=4x2,8x1 mbit_per_s=200 iterations=20
python -m scripts.benchmarks.hosts measure=scaling layouts=2x2,4x2,8x2 mbit_per_s=200
python -m scripts.benchmarks.hosts measure=step layouts=8x1,4x2 compute_ms=400,1200 models=gpt_5m
torchrun --nnodes 4 --nproc-per-node 4 ... -m scripts.benchmarks.hosts measure=averaging iterations=8196

These are Table 1 and Figure 6 of arXiv 2410.11998, and a comparison of engines with DDP and decent-dp. Without a
launcher it emulates hosts (scripts.emulate, as root), one layout and rate after another.

averaging: every iteration averages three fp32 tensors of 25 MB: by torch.distributed.all_reduce (allreduce), or by one
           gossip round of a topology, launched and merged by the engine as a training step does it; nothing overlaps
scaling:   forward and backward are waits of compute_ms / workers, with gradients of the right shapes, as an accelerator
           leaves the CPU free; the optimizer's step and the messages are real. compute_ms=0: linear layers compute
step:      every engine trains the same model from the same seed, in separate processes; with compute_ms=0 it computes.
           What the table in `output` holds is not measured again without --again, and what is measured is added at
           once, so that the same command goes on after an interruption. All rows of a table are of one machine, one
           commit and the same settings. An engine that fails is named, and the others are still measured
"""

import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from common.cli import UsageError, command_of, main_function
from common.planner.conditions import CONDITIONS
from common.record.environment import now
from scripts.benchmarks import measures
from scripts.benchmarks.arguments import (
    EMULATED_RATE,
    ENGINES,
    MODELS,
    MODULE,
    HostsArguments,
    Row,
    StepArguments,
    check_names,
    read,
)
from scripts.benchmarks.record import Benchmark
from scripts.benchmarks.tables import COLUMNS, FORMATS, KEY, TITLES, cases, conclude, table
from scripts.emulate.program import EmulateArguments, check_machine, emulated_hosts, end_like_an_interruption, run_on


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure, write the table."""
    arguments = read(argv)
    measure = arguments.measure
    benchmark = Benchmark(arguments.name, TITLES[measure], COLUMNS[measure], FORMATS[measure])
    launched = "RANK" in os.environ
    if isinstance(arguments, StepArguments):
        if launched:
            raise UsageError("measure=step: it emulates hosts and starts the processes itself; expected no launcher")
        return engines(arguments, benchmark)
    rows = measures.measured(arguments) if launched else everywhere(arguments)
    if rows is not None:
        write(benchmark, arguments, rows)
    return 0


def write(benchmark: Benchmark, arguments: HostsArguments, rows: Sequence[Row], packages: Sequence[str] = ()) -> None:
    """Write the table, and what it says."""
    said = conclude(arguments, rows)
    benchmark.write(rows, said, arguments.output, command_of(MODULE, arguments), "all used", packages)


def everywhere(arguments: HostsArguments) -> list[Row]:
    """Return the rows of all emulated layouts and rates. Raises UsageError naming the layout whose workers failed."""
    end_like_an_interruption()
    rows: list[Row] = []
    for place in places(arguments):
        found = on_emulated_hosts(place)
        if found is None:
            raise UsageError(f"layouts={place.layouts}: the workers failed, see above")
        rows += found
    return rows


def places(arguments: HostsArguments) -> Iterator[HostsArguments]:
    """Yield the arguments of each layout and rate."""
    for layout, rate in product(arguments.layouts.split(","), (arguments.mbit_per_s or EMULATED_RATE).split(",")):
        yield arguments.model_copy(update={"layouts": layout, "mbit_per_s": rate})


def on_emulated_hosts(arguments: HostsArguments) -> list[Row] | None:
    """Return what scripts.benchmarks.measures measures on emulated hosts of one layout and rate; None if it failed."""
    hosts, ranks_per_host = map(int, arguments.layouts.split("x"))
    cluster = EmulateArguments(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        mbit_per_s=float(arguments.mbit_per_s),
        delay_ms=arguments.delay_ms,
        limit_s=arguments.limit_s,
    )
    check_machine(cluster)
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(cluster) as emulated:
        file = Path(folder) / "rows.json"
        given = command_of("scripts.benchmarks.measures", arguments.model_copy(update={"rows": str(file)}))
        code = run_on(emulated, ranks_per_host, shlex.split(given)[1:], arguments.limit_s)
        return None if code or not file.exists() else json.loads(file.read_text(encoding="utf-8"))


# -- engines beside each other: a table that grows


def engines(arguments: StepArguments, benchmark: Benchmark) -> int:
    """Measure what the table lacks, and write it after each engine; 1 if one failed."""
    check_names(arguments, "engines", ENGINES)
    check_names(arguments, "models", MODELS)
    check_names(arguments, "topologies", {topology for _, topology in cases(ranks_per_host=2)})
    check_names(arguments, "conditions", CONDITIONS)
    if "decent_dp" in arguments.engines.split(",") and importlib.util.find_spec("decent_dp") is None:
        raise UsageError("decent-dp is not installed: make env, or leave it out of engines")
    end_like_an_interruption()
    same = {name: getattr(arguments, name) for name in ("delay_ms", "steps", "rounds")}
    same |= {"machine": benchmark.machine, "commit": benchmark.commit}
    rows = {key_of(row): row for row in kept_rows(arguments, same)}
    failed = []
    for job in tqdm(list(jobs_of(arguments)), desc="engines", disable=None):
        known = described(job)
        wanted = job.compute_ms.split(",")
        missing = [ms for ms in wanted if job.again or key_of(known | {"compute_ms": float(ms)}) not in rows]
        if not missing:
            continue
        measured = on_emulated_hosts(job.model_copy(update={"compute_ms": ",".join(missing)}))
        if measured is None:
            failed.append(known)
            continue
        origin = known | same | {"date": now()}
        rows |= {key_of(row): row for row in (result | origin for result in measured)}
        benchmark.save(table(rows.values()).to_dict("records"), arguments.output)
    for known in failed:
        print(f"failed, left out: {', '.join(f'{key}={value}' for key, value in known.items())}", file=sys.stderr)
    if not rows:
        raise UsageError("nothing was measured")
    write(benchmark, arguments, table(rows.values()).to_dict("records"), ["decent-dp"])
    return 1 if failed else 0


def jobs_of(arguments: StepArguments) -> Iterator[StepArguments]:
    """Yield the arguments of each engine on each emulated cluster."""
    for place in places(arguments):
        for model, condition in product(place.models.split(","), place.conditions.split(",")):
            for engine, topology in cases(int(place.layouts.split("x")[1])):
                wanted = place.topologies is None or topology in place.topologies.split(",")
                if wanted and engine in place.engines.split(","):
                    one = {"models": model, "conditions": condition, "engines": engine, "topologies": topology}
                    yield place.model_copy(update=one)


def described(job: StepArguments) -> Row:
    """Return the columns that are known of a job before it is measured."""
    hosts, ranks_per_host = map(int, job.layouts.split("x"))
    return {
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "mbit_per_s": float(job.mbit_per_s),
        "model": job.models,
        "condition": job.conditions,
        "engine": job.engines,
        "topology": job.topologies,
        "bucket_mb": job.bucket_of(job.engines),
    }


def key_of(row: Mapping[str, object]) -> tuple[object, ...]:
    """Return what tells a row from the others."""
    return tuple(row[name] for name in KEY)


def kept_rows(arguments: StepArguments, same: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the rows of the table in `output`, if there is one.

    Raises UsageError where they are not of the `same` machine, commit and settings: they could not be compared.
    """
    file = Path(arguments.output) / f"{arguments.name}.csv"
    if not file.exists():
        return []
    frame = pd.read_csv(file, dtype={"commit": str})
    if missing := [name for name in COLUMNS["step"] if name not in frame]:
        raise UsageError(f"output={arguments.output}: {file.name} has no {', '.join(missing)}; give another output")
    rows = frame.to_dict("records")
    for row in rows:
        for name, value in (same | {"bucket_mb": arguments.bucket_of(row["engine"])}).items():
            if row[name] != value:
                there = f"{file.name} has rows of {row['engine']} with {name}={row[name]}, this is {name}={value}"
                raise UsageError(f"output={arguments.output}: {there}; give another output, or these settings")
    return rows


if __name__ == "__main__":
    sys.exit(main())
