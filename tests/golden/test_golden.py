"""Configurations, runs and checkpoints are what they were; `tests.golden.record` says how the file was made."""

import json
from pathlib import Path

import pytest

from tests.golden.record import CASES, FILE, experiments, machine, run

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.slow  # dozens of compositions
def test_every_experiment_composes_to_the_same_configuration() -> None:
    assert experiments() == GOLDEN["experiments"]


def test_every_case_is_recorded() -> None:
    assert CASES.keys() == GOLDEN["runs"].keys()


@pytest.mark.slow  # 20 steps each
@pytest.mark.parametrize("name", CASES)
def test_short_runs_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Bit for bit with the version of PyTorch and the kind of CPU that wrote the file, elsewhere to a thousandth."""
    found, expected = run(name, tmp_path / "run"), GOLDEN["runs"][name]
    assert found["layout"] == expected["layout"]
    losses = [expected[key] for key in ("train_loss", "validation_loss")]
    assert [found["train_loss"], found["validation_loss"]] == pytest.approx(losses, rel=1e-3)
    if machine() == GOLDEN["machine"]:
        assert found == expected
