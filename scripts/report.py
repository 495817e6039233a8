"""Write one self-contained HTML page with all tables and figures, which opens from disk.

python -m scripts.report output=results/report.html [runs=[runs,results/runs]]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import DEFAULT_RUNS, Arguments, Folders, Text, command_of, main_function, parse
from common.record.environment import describe_environment
from common.report.page import render, sections_of

MODULE = "scripts.report"


class ReportArguments(Arguments):
    """Command line of scripts.report."""

    output: Text = Field(description="the HTML file; links to raw files are relative to it")
    runs: Folders = Field(DEFAULT_RUNS, description="the folder that holds the runs, or several: [a,b]")
    benchmarks: Text = Field("results/benchmarks", description="the folder that holds the benchmarks' records")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write the page; exit code 2 if a definition is wrong."""
    arguments = parse(ReportArguments, argv, MODULE, "Write an HTML page with all tables and figures.")
    page = Path(arguments.output)
    sections = sections_of([Path(folder) for folder in arguments.runs], Path(arguments.benchmarks), page)
    environment = describe_environment("", [])
    commit = f"{environment['git_commit']}{' with uncommitted changes' * environment['git_dirty']}"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        render(sections, date=environment["start"], commit=commit, command=command_of(MODULE, arguments)),
        encoding="utf-8",
    )
    print(f"written: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
