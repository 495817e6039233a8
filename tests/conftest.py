"""How tests are shared out among processes (pytest -n 2 --dist loadgroup): by file, so that fixtures are made once."""

import pytest

SLURM = "slurm"  # there is one on the machine


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLURM not in item.path.parts)  # the longest first
    for item in items:
        group = SLURM if SLURM in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
