"""Writes slurm/<table>/<row>.sbatch, a thin file for each row of each table that names a cluster.

python -m slurm.rows          writes them anew; a test says so if they do not fit results/definitions/tables
"""

import shlex
import sys
from pathlib import Path

from common.report.definitions import ROOT
from common.report.registry import TABLES, Row, Table, load_table
from slurm.submit import Cluster, ranks_of

FOLDER = ROOT / "slurm"
MADE_BY = "# Made by `python -m slurm.rows`"


def main() -> int:
    """Writes all files; those of rows that are gone are removed."""
    wanted = all_files()
    for file in made():
        file.unlink()
    for file, text in wanted.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    print(f"{len(wanted)} files below {FOLDER}")
    return 0


def made() -> list[Path]:
    """The files that are there, without the user's own."""
    return [file for file in sorted(FOLDER.glob("*/*.sbatch")) if MADE_BY in file.read_text()]


def all_files() -> dict[Path, str]:
    """Content of every row's file."""
    tables = [load_table(file.stem) for file in sorted(TABLES.glob("*.yaml"))]
    return {
        FOLDER / table.name / f"{name_of(row, variant)}.sbatch": row_file(table, row, variant)
        for table in tables
        if table.cluster is not None
        for row in table.rows
        for variant in table.variants or [None]
    }


def name_of(row: Row, variant: str | None) -> str:
    """Of a row's file."""
    return row.name if variant is None else f"{row.name}_{variant}"


def row_file(table: Table, row: Row, variant: str | None) -> str:
    """A batch script: sbatch's options for the row's number of ranks, then what train.sbatch is given."""
    cell = table.cell(row, table.seeds[0], Path("runs"), variant)
    name = name_of(row, variant)
    overrides = [*cell.settings[:-1], f"run_dir={cell.run_dir.parent}/seed_${{seed}}"]  # the last one is the seed
    options = [f"--job-name={table.name}-{name}", *Cluster.load(table.cluster).for_ranks(ranks_of(cell))]
    lines = [
        "#!/usr/bin/env bash",
        f"# {table.title}: {', '.join([row.method, row.topology, *filter(None, [variant])])}.",
        f"{MADE_BY} of results/definitions/tables/{table.name}.yaml.",
        f"#   sbatch slurm/{table.name}/{name}.sbatch seed={table.seeds[0]} [overrides ...]",
        *(f"#SBATCH {option}" for option in options),
        *common_options(),
        f'exec bash slurm/train.sbatch {shlex.join([table.task, *overrides])} "$@"',
    ]
    return "\n".join(lines) + "\n"


def common_options() -> list[str]:
    """The lines of train.sbatch that hold for every job."""
    lines = (FOLDER / "train.sbatch").read_text().splitlines()
    return [line for line in lines if line.startswith("#SBATCH") and "--job-name" not in line]


if __name__ == "__main__":
    sys.exit(main())
