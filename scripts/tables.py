"""Make a table from finished runs or from a benchmark's record, with the published numbers next to ours.

python -m scripts.tables table=3 [runs=[runs,results/runs]] [output=runs/report]
python -m scripts.tables table=table3_fair --keep
python -m scripts.tables readme=results/README.md
python -m scripts.tables runs=[runs/cnn/a,runs/cnn/b]

table=3 is table3; also figure6, table3_fair, ...: every file of results/definitions/tables and /benchmarks. Files go
to runs/report; --keep updates the tracked ones in results/tables instead, from the kept runs alone.
With readme=... the scoreboard between its markers is regenerated from the kept tables and records. With only runs=...
the finished runs in these folders, of any kind, are printed side by side.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pydantic import Field

from common.atomic import write_atomically
from common.cli import DEFAULT_RUNS, Arguments, Folders, Text, UsageError, command_of, main_function, parse
from common.experiments.collect import collect
from common.experiments.definitions import names_in
from common.experiments.load import compare
from common.experiments.tables import full_name, load_table
from common.report.benchmark_tables import (
    BENCHMARKS,
    LEFT,
    build_benchmark,
    load_benchmark,
    missing_records,
    shown_benchmark,
    write_benchmark,
)
from common.report.claims import BLOCK, fill_blocks
from common.report.tables import build_table, format_texts, left_of, missing_summary, shown, write_table

MODULE = "scripts.tables"
OUTPUT, KEPT = "runs/report", Path("results/tables")


class TablesArguments(Arguments):
    """Command line of scripts.tables."""

    table: Text | None = Field(None, description="a file of results/definitions/tables or /benchmarks; 3 is table3")
    readme: Text | None = Field(None, description="a Markdown file whose scoreboard to update, instead of table=...")
    runs: Folders = Field(DEFAULT_RUNS, description="the folder that holds the runs, or several: [a,b]")
    benchmarks: Text = Field("results/benchmarks", description="the folder that holds the benchmark records")
    output: Text = Field(OUTPUT, description="folder for NAME.csv, ...")
    keep: bool = Field(False, description="update results/tables from results/runs and results/benchmarks")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write the table and print it; exit code 2 if there is nothing to make it from."""
    arguments = parse(TablesArguments, argv, MODULE, "Make a table from finished runs.")
    if arguments.readme:
        if arguments != TablesArguments(readme=arguments.readme):
            raise UsageError(f"readme={arguments.readme}: expected no other key: it shows kept runs and records")
        return _fill(Path(arguments.readme))
    if not arguments.table and arguments.runs != DEFAULT_RUNS:
        if arguments != TablesArguments(runs=arguments.runs):
            raise UsageError(f"runs={','.join(arguments.runs)}: expected no other key without table=...")
        print(_fitted(compare([Path(folder) for folder in arguments.runs]), ["run"]))
        return 0
    if not arguments.table:
        raise UsageError("table=...: missing; expected a file of results/definitions/tables or /benchmarks")
    name = full_name(arguments.table, "table")
    asked = TablesArguments(table=name, runs=arguments.runs, benchmarks=arguments.benchmarks, keep=arguments.keep)
    if arguments.keep and arguments != TablesArguments(table=arguments.table, keep=True):
        raise UsageError(f"--keep: expected no other key: it reads results/ alone and writes {KEPT}")
    output = KEPT if arguments.keep else Path(arguments.output)
    command = command_of(MODULE, asked)
    if name in names_in(BENCHMARKS):
        benchmark, records = load_benchmark(name), Path(arguments.benchmarks)
        files = write_benchmark(name, records, output, command, arguments.keep)
        print(format_texts(shown_benchmark(benchmark, build_benchmark(benchmark, records)), LEFT))
        missing = missing_records(benchmark, records)
    else:
        table = load_table(arguments.table, also=names_in(BENCHMARKS))
        if table.untuned:
            raise UsageError(table.untuned)
        # Published numbers are worth a table of their own, but not in place of one with runs when a folder is mistyped.
        alone = bool(table.published) and arguments.runs == DEFAULT_RUNS
        roots = [KEPT.with_name("runs")] if arguments.keep else map(Path, arguments.runs)
        make_in = Path("runs") if arguments.keep else None
        collection = collect(table, *roots, allow_empty=alone, make_in=make_in)
        files = write_table(collection, output, command, arguments.keep)
        print(_fitted(shown(build_table(collection), collection.table), left_of(table)))
        missing = missing_summary(collection)
    for line in missing:
        print(f"missing: {line}")
    print("written:", *files)
    return 0


def _fitted(shown: pd.DataFrame, left: Sequence[str]) -> str:
    """Return texts as a table for the console, with rows and columns swapped if it is too wide for the terminal."""
    text = format_texts(shown, left)
    if len(text.partition("\n")[0]) <= shutil.get_terminal_size(fallback=(240, 24)).columns:
        return text
    turned = shown.T.reset_index()
    turned.columns = ["", *map(str, range(1, len(shown) + 1))]
    return format_texts(turned, turned.columns)


def _fill(readme: Path) -> int:
    if not readme.is_file():
        raise UsageError(f"readme={readme}: no such file")
    try:
        text = readme.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"readme={readme}: expected a Markdown file in UTF-8 ({error})") from None
    if not BLOCK.search(text):
        markers = "`<!-- table: claims -->` or `<!-- table: verdicts -->`, and `<!-- end -->` below"
        raise UsageError(f"readme={readme}: expected a line {markers}")
    write_atomically(readme, fill_blocks(text).encode())
    print(f"written: {readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
