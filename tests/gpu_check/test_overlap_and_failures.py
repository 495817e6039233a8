"""Checks 9 and 10 with real processes."""

import pytest

from scripts.gpu_check import failures, overlap
from scripts.gpu_check.outcome import Machine

CPU = Machine("cpu")
pytestmark = pytest.mark.slow


def test_the_sweep_measures_every_size_and_transport() -> None:
    figure = overlap.check(CPU)
    for named in ("2.0 MiB", "256.0 MiB", "send_recv", "subgroup"):
        assert named in figure


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_fails_ends_the_job(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(failures.END_WITHIN_S, how, 150.0)  # beside other tests
    monkeypatch.setattr(failures, "RUN", [text.replace("timeout_s=20", "timeout_s=6") for text in failures.RUN])
    assert failures.fail(CPU, how) > 0
