from pathlib import Path
from typing import Any

import pytest

from common.experiments.table_file import TableFile
from common.experiments.tables import Table

CONTENT = {
    "title": "A small table",
    "note": "Made by a test.",
    "task": "cnn",
    "seeds": [1, 2, 3],
    "overrides": ["experiment=small"],
    "rows": [
        {
            "name": "allreduce",
            "method": "AllReduce",
            "topology": "complete",
            "overrides": ["parallel=allreduce", "optimizer=adam"],
        },
        {
            "name": "accumadam_aer",
            "method": "AccumAdam",
            "topology": "aer",
            "overrides": ["parallel=decentralized", "topology=aer", "optimizer=accumadam"],
        },
    ],
}


def make_table(**changes: Any) -> Table:
    """Return the small table, with other values of some keys."""
    return Table.of("small", TableFile.model_validate(CONTENT | changes))


@pytest.fixture
def table() -> Table:
    """Two rows of three seeds."""
    return make_table()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Paths in commands stay relative, as users have them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def registered(table: Table, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The small table, found by the scripts under its name."""
    for script in ("reproduce", "tables", "figures", "keep"):
        monkeypatch.setattr(f"scripts.{script}.load_table", lambda name, *_, **__: table)
    return table
