"""Benchmarks on several hosts: emulated ones of several layouts and rates, or those of the launcher that started them.

Without a launcher a benchmark brings up emulated hosts (scripts/emulate, as root) for every layout and rate, runs
itself there under torchrun, and collects the rows. Under torchrun or srun it is one of the workers, and rank 0 writes.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, PositiveFloat

from common.cli import Arguments, Text, UsageError, command_of
from common.parallel.collectives import gather_objects
from common.parallel.process_groups import process_group
from common.report.benchmark import Benchmark
from common.runtime.measure import layout
from common.spelling import nearest
from scripts.emulate.program import EmulateArguments, check_machine, emulated_hosts, end_like_an_interruption, run_on

EMULATED_RATE = "200"  # Mbit/s
TIMEOUT_S = 300.0  # of a collective
Row = dict[str, object]


class LayoutArguments(Arguments):
    """Arguments that all benchmarks on several hosts take."""

    layouts: Text = Field("4x2", pattern=r"^\d+x\d+(,\d+x\d+)*$", description="HOSTSxRANKS_PER_HOST,... to emulate")
    mbit_per_s: Text | None = Field(
        None,
        pattern=r"^[\d.]+(,[\d.]+)*$",
        description=f"RATE,... of emulated hosts, {EMULATED_RATE} if none; under torchrun only noted",
    )
    delay_ms: NonNegativeFloat = Field(1.0, description="one-way, between emulated hosts")
    limit_s: PositiveFloat = Field(3600, description="seconds after which an emulated layout is ended")
    output: Text = Field("results/benchmarks", description="where the table is written, as .csv and .md")
    rows: Text | None = Field(None, description="where workers leave their rows for the process that started them")


def _rows_of_layouts(module: str, arguments: LayoutArguments) -> list[Row]:
    """Run `module` on every emulated layout and rate, one after another; returns all rows.

    Raises UsageError where hosts cannot be emulated, or naming the layout whose workers failed.
    """
    end_like_an_interruption()
    rows: list[Row] = []
    for text in arguments.layouts.split(","):
        hosts, ranks_per_host = map(int, text.split("x"))
        for rate in (arguments.mbit_per_s or EMULATED_RATE).split(","):
            cluster = EmulateArguments(
                hosts=hosts,
                ranks_per_host=ranks_per_host,
                mbit_per_s=float(rate),
                delay_ms=arguments.delay_ms,
                limit_s=arguments.limit_s,
            )
            check_machine(cluster)
            rows += _on_emulated_hosts(
                module, arguments.model_copy(update={"layouts": text, "mbit_per_s": rate}), cluster
            )
    return rows


def _on_emulated_hosts(module: str, arguments: LayoutArguments, cluster: EmulateArguments) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(cluster) as hosts:
        file = Path(folder) / "rows.json"
        given = shlex.split(command_of(module, arguments.model_copy(update={"rows": str(file)})))
        code = run_on(hosts, cluster.ranks_per_host, given[1:], cluster.limit_s)
        if code or not file.exists():
            raise UsageError(f"layouts={arguments.layouts}: the workers failed with exit code {code}, see above")
        return json.loads(file.read_text(encoding="utf-8"))


def run(
    module: str,
    arguments: LayoutArguments,
    benchmark: Benchmark,
    measure: Callable[[torch.device, int], list[Row]],
    conclude: Callable[[list[Row]], list[str]],
) -> int:
    """Run a benchmark here (as one of a launcher's workers) or on emulated hosts, and write its table.

    measure(device, ranks_per_host) gives the rows of one layout, called by every rank. Raises UsageError where hosts
    cannot be emulated, or naming the layout whose workers failed.
    """
    if "RANK" in os.environ:
        rows = _work(arguments, measure)
        if rows is not None and arguments.rows is not None:
            Path(arguments.rows).write_text(json.dumps(rows), encoding="utf-8")
            return 0
    else:
        rows = _rows_of_layouts(module, arguments)
    if rows is not None:
        benchmark.write(rows, conclude(rows), arguments.output, command_of(module, arguments), "all used")
    return 0


def _work(arguments: LayoutArguments, measure: Callable[[torch.device, int], list[Row]]) -> list[Row] | None:
    """Do one worker's part; rank 0 gets the rows."""
    try:
        with process_group(TIMEOUT_S) as device:
            names, ranks_per_host = layout()
            known = {
                "workers": len(names),
                "hosts": len(names) // ranks_per_host,
                "ranks_per_host": ranks_per_host,
                "mbit_per_s": None if arguments.mbit_per_s is None else float(arguments.mbit_per_s),
            }
            rows = [known | row for row in measure(device, ranks_per_host)]
            dist.barrier()
            return rows if dist.get_rank() == 0 else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def mean_over_hosts(value: float | None, ranks_per_host: int) -> float | None:
    """Return the mean of the values of each host's first rank, None if one of them is None. Collective."""
    values = gather_objects(value)[::ranks_per_host]
    return None if None in values else sum(values) / len(values)


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(text: str) -> None:
    """Print a line on stderr, from rank 0."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def names_in(text: str, known: Sequence[str], key: str) -> list[str]:
    """Return the comma-separated names of `text`. Raises UsageError for the first that is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UsageError(f"{key}={text}: {name!r}: {nearest(name, known)}")
    return names
