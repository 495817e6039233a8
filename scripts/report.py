"""Write one self-contained HTML page with all tables and figures, which opens from disk.

python -m scripts.report output=results/report.html [runs=[runs,results/runs]]
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from common.cli import DEFAULT_RUNS, Arguments, Folders, Text, command_of, main_function, parse
from common.record.environment import describe_environment
from common.report.origin import describe_commit
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
    output, roots = Path(arguments.output), [Path(folder) for folder in arguments.runs]
    environment = describe_environment("", [])
    about = (
        f"Generated {environment['start']} at commit {describe_commit(environment)} by {command_of(MODULE, arguments)} "
        "from the files of finished runs and from benchmark records. Published values are the papers', not measured "
        "here. A proxy is a small version of a paper's experiment: its order of rows can be compared with the paper's, "
        "its numbers cannot."
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as drawn:
        page = render(list(sections_of(roots, Path(arguments.benchmarks), Path(drawn))), output, about)
    output.write_text(page, encoding="utf-8")
    print(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
