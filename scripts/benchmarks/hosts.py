"""Measure averaging and steps on several hosts: emulated ones, or the hosts of the launcher that started this.

python -m scripts.benchmarks.hosts measure=averaging layouts=4x2,8x1 mbit_per_s=200 iterations=20
python -m scripts.benchmarks.hosts measure=scaling layouts=2x2,4x2,8x2 mbit_per_s=200
python -m scripts.benchmarks.hosts measure=step layouts=8x1,4x2 compute_ms=400,1200 models=gpt_5m
torchrun --nnodes 4 --nproc-per-node 4 ... -m scripts.benchmarks.hosts measure=averaging iterations=8196

These are Table 1 and Figure 6 of arXiv 2410.11998, and a comparison of engines with DDP and decent-dp. Without a
launcher it emulates hosts (scripts.emulate, as root), one layout and rate after another.

averaging: every iteration averages three fp32 tensors of 25 MB: by torch.distributed.all_reduce (allreduce), or by one
           gossip round of a topology, launched and merged by the engine as a training step does it; nothing overlaps
scaling:   forward and backward are waits of compute_ms / workers, with gradients of the right shapes, as an accelerator
           leaves the CPU free; the optimizer's step and the messages are real
step:      every engine trains the same model from the same seed, in separate processes; with compute_ms=0 it computes.
           Rows that the table in `output` has are not measured again without --again, and new rows are added at once,
           so that the same command continues after an interruption. All rows of a table are from one machine and one
           commit, with the same settings. An engine that fails is named, and the others are still measured
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
from common.record.environment import now
from scripts.benchmarks import measures
from scripts.benchmarks.arguments import (
    CASES,
    EMULATED_RATE,
    MODULE,
    OF_SEVERAL_RANKS,
    HostsArguments,
    Row,
    StepArguments,
    read,
)
from scripts.benchmarks.record import Benchmark
from scripts.benchmarks.tables import COLUMNS, FORMATS, KEY, SAID, TITLES, table
from scripts.emulate import EmulateArguments, check_machine, emulated_hosts, end_like_an_interruption, run_on


@main_function
def main(argv: Sequence[str]) -> int:
    """Measure and write the table."""
    arguments = read(argv)
    measure, launched = arguments.measure, "RANK" in os.environ
    benchmark = Benchmark(arguments.name, TITLES[measure], COLUMNS[measure], FORMATS[measure])
    code, packages = 0, []
    if isinstance(arguments, StepArguments):
        if launched:
            raise UsageError("measure=step: it emulates hosts and starts the processes itself; expected no launcher")
        rows, code = engines(arguments, benchmark)
        packages = ["decent-dp"]
    elif launched:
        rows = measures.measured(arguments)
    else:
        rows, code = everywhere(arguments)
    if rows == []:
        raise UsageError("nothing was measured")
    if rows is not None:  # else another rank has them
        command = command_of(MODULE, arguments)
        benchmark.write(rows, [SAID[measure]], arguments.output, command, "all used", packages)
    return code


def everywhere(arguments: HostsArguments) -> tuple[list[Row], int]:
    """Return the rows of all emulated layouts and rates, and 1 if any of them failed (it is named), else 0."""
    end_like_an_interruption()
    rows: list[Row] = []
    failed = 0
    for place in places(arguments):
        measured = on_emulated_hosts(place)
        if measured is None:
            failed = 1
            print(f"failed, left out: layouts={place.layouts} mbit_per_s={place.mbit_per_s}", file=sys.stderr)
        rows += measured or []
    return rows, failed


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
    check_machine()
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(cluster) as emulated:
        file = Path(folder) / "rows.json"
        given = command_of("scripts.benchmarks.measures", arguments.model_copy(update={"rows": str(file)}))
        code = run_on(emulated, ranks_per_host, shlex.split(given)[1:], arguments.limit_s)
        return None if code or not file.exists() else json.loads(file.read_text(encoding="utf-8"))


# -- engines side by side: a table that grows


def engines(arguments: StepArguments, benchmark: Benchmark) -> tuple[list[Row], int]:
    """Measure what the table lacks, save it after each engine; return all rows, and 1 if an engine failed, else 0."""
    if "decent_dp" in arguments.engines.split(",") and importlib.util.find_spec("decent_dp") is None:
        raise UsageError("decent-dp is not installed: make env, or leave it out of engines")
    end_like_an_interruption()
    same = {name: getattr(arguments, name) for name in ("delay_ms", "steps", "rounds")}
    same |= {"machine": benchmark.machine, "commit": benchmark.commit}
    rows = {key_of(row): row for row in kept_rows(arguments, same)}
    failed = 0
    for job, known in tqdm(list(jobs_of(arguments)), desc="engines", disable=None):
        wanted = job.compute_ms.split(",")
        missing = [ms for ms in wanted if job.again or key_of(known | {"compute_ms": float(ms)}) not in rows]
        if not missing:
            continue
        measured = on_emulated_hosts(job.model_copy(update={"compute_ms": ",".join(missing)}))
        if measured is None:
            failed = 1
            print(f"failed, left out: {', '.join(f'{key}={value}' for key, value in known.items())}", file=sys.stderr)
            continue
        origin = known | same | {"date": now()}
        rows |= {key_of(row): row for row in (result | origin for result in measured)}
        benchmark.save(table(rows.values()).to_dict("records"), arguments.output)
    return table(rows.values()).to_dict("records") if rows else [], failed


def jobs_of(arguments: StepArguments) -> Iterator[tuple[StepArguments, Row]]:
    """Yield the arguments of each engine on each emulated cluster, and the columns that are known before it runs."""
    for place in places(arguments):
        hosts, ranks_per_host = map(int, place.layouts.split("x"))
        cases = [case for case in CASES if ranks_per_host > 1 or case not in OF_SEVERAL_RANKS]
        for model, condition in product(place.models.split(","), place.conditions.split(",")):
            for engine, topology in cases:
                if engine not in place.engines.split(",") or topology not in (place.topologies or topology).split(","):
                    continue
                one = {"models": model, "conditions": condition, "engines": engine, "topologies": topology}
                yield (
                    place.model_copy(update=one),
                    {
                        "hosts": hosts,
                        "ranks_per_host": ranks_per_host,
                        "mbit_per_s": float(place.mbit_per_s),
                        "model": model,
                        "condition": condition,
                        "engine": engine,
                        "topology": topology,
                        "bucket_mb": place.bucket_of(engine),
                    },
                )


def key_of(row: Mapping[str, object]) -> tuple[object, ...]:
    """Return the values that identify a row."""
    return tuple(row[name] for name in KEY)


def kept_rows(arguments: StepArguments, same: Mapping[str, object]) -> list[Row]:
    """Return the rows of the table in `output`, if there is one.

    Raises UsageError if they are not from the `same` machine, commit and settings: they could not be compared.
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
