"""Write the explorer: one interactive HTML page with everything in the kept runs and records; it opens from disk.

python -m scripts.report            results/explorer.html, from the kept records alone
python -m scripts.report --check    fail if numbers on that page do not follow from them, and name the first few
python -m scripts.report runs=runs/ watch=true

With runs=... the page of your own runs is runs/report/explorer.html, which also shows the progress of unfinished runs.
With watch=true it is rewritten every `every` seconds, and reloads itself.
"""

import os
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

from common.atomic import write_atomically
from common.cli import Arguments, Folders, Text, UsageError, command_of, main_function, parse
from common.experiments.definitions import ROOT
from common.explorer import live
from common.explorer.data import build
from common.explorer.page import differences, read_page, render

MODULE = "scripts.report"
KEPT, PAGE, OWN = "results/runs", "results/explorer.html", "runs/report/explorer.html"
NAMED = 10  # differences that --check prints


class ReportArguments(Arguments):
    """Command line of scripts.report."""

    output: Text | None = Field(None, description=f"the HTML file (null: {PAGE} for kept runs, else {OWN})")
    runs: Folders = Field((KEPT,), description="the folder that holds the runs, or several: [a,b]")
    check: bool = Field(False, description="only compare the page with the records; exit code 1 if they differ")
    watch: bool = Field(False, description="keep updating the page until interrupted, to follow runs in progress")
    every: PositiveFloat = Field(30, description="seconds between updates with watch=true")


@main_function
def main(argv: Sequence[str]) -> int:
    """Write or check the page; exit code 1 if a check fails, 2 if an argument or a definition is wrong."""
    arguments = parse(ReportArguments, argv, MODULE, "Write an interactive HTML page of all results.")
    roots = [Path(folder) for folder in arguments.runs]
    kept = [root.resolve() for root in roots] == [(ROOT / KEPT).resolve()]
    output = Path(arguments.output or (PAGE if kept else OWN))
    if arguments.check and arguments.watch:
        raise UsageError("check=true: expected without watch=true")
    if arguments.check:
        return _check(output, roots, command_of(MODULE, arguments))
    ended, data = None, {}
    while True:
        if (now := live.ended(roots)) != ended:  # else only unfinished runs have changed
            ended, data = now, build(roots)
        running = live.unfinished(roots) if arguments.watch or not kept else None
        page = _page(data, output, running)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page.encode())
        left = "" if running is None else f", unfinished runs: {len(running)}"
        print(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB{left})", flush=True)
        if not arguments.watch:
            return 0
        time.sleep(arguments.every)


def _page(data: dict[str, Any], output: Path, running: Sequence[dict[str, Any]] | None = None) -> str:
    return render(data, running, os.path.relpath(ROOT / "results", output.resolve().parent))


def _check(output: Path, roots: Sequence[Path], command: str) -> int:
    """Print where the page differs from one made now; return the exit code."""
    if not output.is_file():
        raise UsageError(f"output={output}: no such file; {command.replace(' --check', '')} makes it")
    (shown, running), made = read_page(output), build(roots)
    wrong = differences(shown, made)
    found = [f"{output}: {line}" for line in islice(wrong, NAMED)]
    more = sum(1 for _ in wrong)
    # Tables and scripts are made from the page's own data, which have been checked by now.
    if not found and output.read_text(encoding="utf-8") != _page(shown, output, running):
        found = [f"{output}: its tables, scripts or style differ from what this code makes from its data"]
    for line in found:
        print(line, file=sys.stderr)
    if more:
        print(f"and {more} more", file=sys.stderr)
    if not found:
        print(f"{output}: every number follows from the records")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
